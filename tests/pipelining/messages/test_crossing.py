"""What crosses stages beside tensors, and what ranks keep in mind of it from step to step."""

from __future__ import annotations

import copy
import enum
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.errors import PipelinePeerError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    PipeliningShapeError,
    SplitPoint,
    get_schedule_class,
    pipeline,
)
from meshwright.testing import Ranks
from support.internals.pipelining import signature
from support.internals.schedule import stage_ranks

CPU = torch.device("cpu")


class Telling(nn.Module):
    """Gives constants of every kind, which differ from microbatch to microbatch, and uses them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, told: Any = None) -> Any:
        if told is None:
            told = {"number": int(x.detach().abs().sum() * 1000) % 5, "list": [False, None, 0.5]}
        number = told["number"] + 1
        flag, maybe, scale = told["list"]
        assert type(number) is int
        assert (type(flag), type(scale)) == (bool, float)
        y = torch.tanh(self.layer(x)) * scale + number % 3
        if flag:
            y = y * len(told["text"])
        if maybe is not None:
            y = y + maybe[0] % 7
        return y, {
            "number": number,
            "list": [number % 2 == 0, (2**70 + number, "\ud800é") if maybe else None, 1 / number],
            "text": "a" * 90 * number,
            "kind": torch.float32 if number % 2 else torch.float64,
        }


def made(name: str, layers: list[nn.Module], count: int, **more: Any) -> tuple[Any, list[int]]:
    """A schedule on all ranks, and the stages of this one."""
    world, kind = communicator(), get_schedule_class(name)
    holders = stage_ranks(world.size, len(layers), "v" if "V" in name else "loop")
    mine = [s for s, rank in enumerate(holders) if rank == world.rank]
    stages = [PipelineStage(layers[s], s, len(layers), CPU) for s in mine]
    is_multi = issubclass(kind, PipelineScheduleMulti)
    return kind(stages if is_multi else stages[0], count, **more), mine


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output[0] - target).square().sum()


def body_constants(name: str) -> None:
    world = communicator()
    count = world.size * (2 if "V" in name or "Inter" in name else 1)
    layers: list[nn.Module] = [Telling(seed) for seed in range(count)]
    ones = copy.deepcopy(layers)
    schedule, mine = made(name, layers, 2 * count, loss_fn=squares, scale_grads=False)
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2, 4 * count, 4, dtype=torch.float64)
        expected = []
        for part, wanted in zip(x.chunk(2 * count), target.chunk(2 * count), strict=True):
            value: Any = (part,)
            for one in ones:
                value = one(*value)
            squares(value, wanted).backward()
            expected.append(value)
        assert len({told["number"] for _, told in expected}) > 1
        losses: list[Any] = []
        kwargs = {"target": target} if count - 1 in mine else {}
        with observe(recorder := Recorder()):
            schedule.step(
                *((x,) if 0 in mine else ()), losses=losses, return_outputs=False, **kwargs
            )
        if step and 0 in mine:
            # What was told before is not told again: each message has a letter with constants,
            # and the first of a stage says in it which step it is of.
            labels = [label for kind, label in recorder.kinds() if kind == "send"]
            assert labels.count("step and constants of stage 0") == 1
            assert labels.count("constants of stage 0") == 2 * count - 1
            assert not any("signature" in label or "ids" in label for label in labels)
            assert sum(label.startswith("step") for label in labels) == len({*mine} - {count - 1})
        for s in mine:
            for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        if count - 1 in mine:
            found = schedule._stages[count - 1].output_chunks
            for (a, told), (b, wanted) in zip(found, expected, strict=True):
                assert torch.equal(a, b)
                assert told == wanted


@pytest.mark.slow
def test_constants_that_change_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, body_constants, "Interleaved1F1B")


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_constants_that_change(ranks: Ranks) -> None:
    for name in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        ranks(2, body_constants, name)


class Reads(nn.Module):
    """Reads numbers out of tensors in one stage and uses them in others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, count = x[0, 0].item(), (x.sum() > 0).long().item()
        rows = x.shape[0]
        x = torch.tanh(self.a(x)) * rows
        x = torch.tanh(self.b(x)) * scale
        return self.d(torch.tanh(self.c(x)) + count) * scale + rows


def body_traced() -> None:
    world = communicator()
    model, one = Reads(), Reads()
    names = {2: ["c"], 4: ["b", "c", "d"]}[world.size]
    spec = dict.fromkeys(names, SplitPoint.BEGINNING)
    rows = {"x": {0: torch.export.Dim.DYNAMIC}}
    x, target = torch.randn(2, 13, 4, dtype=torch.float64, generator=torch.manual_seed(2))
    pipe = pipeline(model, (x[:3],), split_spec=spec, dynamic_shapes=rows)
    stage = pipe.build_stage(world.rank, CPU)
    kind = get_schedule_class("1F1B")
    schedule = kind(stage, 5, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    args = (x,) if stage.is_first else ()
    out = schedule.step(*args, **({"target": target} if stage.is_last else {}))
    parts = [one(part) for part in x.tensor_split(5)]
    nn.MSELoss(reduction="sum")(torch.cat(parts), target).backward()
    if out is not None:
        torch.testing.assert_close(out, torch.cat(parts))
    wanted = dict(one.named_parameters())
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_numbers_of_traced_stages(ranks: Ranks, size: int) -> None:
    ranks(size, body_traced)


class Level(enum.IntEnum):
    """A number to Python, and not the same in JSON."""

    LOW = 1


class Sneaks(nn.Module):
    """Gives a number, and another kind of value in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return x, 1 if self.count < 5 else Level.LOW


class Takes(nn.Module):
    def forward(self, x: torch.Tensor, _: int) -> torch.Tensor:
        return x


def body_refused() -> None:
    schedule, mine = made("GPipe", [Sneaks(), Takes()], 4)
    args = (torch.ones(4, 4),) if 0 in mine else ()
    schedule.step(*args)
    text = r"value 1, is of type .*Level; expected a tensor, None, bool"
    kind = PipeliningShapeError if 0 in mine else PipelinePeerError
    with pytest.raises(kind, match=text):
        schedule.step(*args)


def test_other_constants_are_refused_by_name(ranks: Ranks) -> None:
    ranks(2, body_refused)


def body_bounded() -> None:
    """More kinds of batches than are kept in mind, some of which come again."""
    world = communicator()
    signature.KEPT = 3
    layers: list[nn.Module] = [Telling(seed) for seed in range(2 * world.size)]
    ones = copy.deepcopy(layers)
    schedule, mine = made("ZBVZeroBubble", layers, 4, loss_fn=squares, scale_grads=False)
    for rows in (4, 5, 6, 4, 8, 9, 10, 11, 5, 4, 4, 13, 11, 5):
        x, target = torch.randn(2, rows, 4, dtype=torch.float64, generator=torch.manual_seed(rows))
        args, kwargs = ((x,), {"target": target}) if 0 in mine else ((), {})
        schedule.step(*args, return_outputs=False, **kwargs)
        for part, wanted in zip(x.tensor_split(4), target.tensor_split(4), strict=True):
            value: Any = (part,)
            for one in ones:
                value = one(*value)
            squares(value, wanted).backward()
        for s in mine:
            for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
    known = schedule._runtime.transport.signatures.stages
    assert sorted(known) == ([0, 1, 2] if 0 not in mine else [0, 2])
    assert [len(ids) for ids in known.values()] == [3] * len(known)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_what_is_kept_in_mind_is_bounded(ranks: Ranks) -> None:
    ranks(2, body_bounded)


class Scaled(nn.Module):
    """Scales each column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def body_posts(width: int) -> list[str]:
    """The transfers of payloads in the order in which this rank issues them."""
    layers: list[nn.Module] = [Scaled(width) for _ in range(2)]
    schedule, mine = made("1F1B", layers, 4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, width)
    args, kwargs = ((x,), {}) if 0 in mine else ((), {"target": x})
    schedule.step(*args, **kwargs)
    with observe(recorder := Recorder()):
        schedule.step(*args, **kwargs)
    return [label for _, label in recorder.kinds() if "RECV" in label or "SEND" in label]


@pytest.mark.devices("host")
@pytest.mark.backends("gloo")
def test_receives_of_small_messages_are_posted_together(ranks: Ranks) -> None:
    _, small = ranks(2, body_posts, 4)
    assert small[:4] == ["1RECV_F0", "1RECV_F1", "1RECV_F2", "1RECV_F3"]
    _, large = ranks(2, body_posts, 1 << 15)
    assert large[:5] == ["1RECV_F0", "1RECV_F1", "1SEND_B0", "1RECV_F2", "1SEND_B1"]
    assert sorted(large) == sorted(small)
