"""Every schedule against one process: outputs, losses, gradients, state."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.errors import CollectiveMismatchError, PipelinePeerError
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    PipeliningShapeError,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
    Source,
    StageEdges,
    get_schedule_class,
)
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import Ranks
from support.internals.pipelining import Signature, Values, signature_of
from support.internals.schedule import stage_ranks

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def chunks_of(name: str) -> int:
    return 2 if issubclass(get_schedule_class(name), PipelineScheduleMulti) else 1


def mine(name: str, ranks: int) -> list[int]:
    stages = ranks * chunks_of(name)
    style = "v" if "V" in name else "loop"
    rank = communicator().rank
    return [s for s, r in enumerate(stage_ranks(ranks, stages, style)) if r == rank]


def made(
    name: str,
    layers: list[nn.Module],
    microbatches: int,
    loss: Callable[..., Any] | None,
    **more: Any,
) -> Any:
    world = communicator()
    listed = mine(name, world.size)
    edges = more.pop("edges", None)
    stages = [PipelineStage(layers[s], s, len(layers), CPU, edges=edges) for s in listed]
    kind = get_schedule_class(name)
    one_or_all = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(one_or_all, microbatches, loss_fn=loss, **more)


def given(name: str, count: int, x: Any, target: Any = None, **more: Any) -> tuple[Any, Any]:
    """Arguments of a step on this rank."""
    listed = mine(name, communicator().size)
    args = (x,) if 0 in listed else ()
    if count - 1 in listed and target is not None:
        more["target"] = target
    return args, more


def compare(
    layers: list[nn.Module], ones: list[nn.Module], listed: list[int], factor: float
) -> None:
    for s in listed:
        pairs = zip(layers[s].parameters(), ones[s].parameters(), strict=True)
        for a, b in pairs:
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                torch.testing.assert_close(a.grad, factor * b.grad, rtol=1e-10, atol=1e-12)


def body_equal(name: str) -> None:
    """Mean and sum losses, accumulated steps, evaluation in between, uneven batches."""
    world = communicator()
    count = world.size * chunks_of(name)
    microbatches = 4 * world.size
    for reduction, rows in (("mean", 2 * microbatches + 1), ("sum", 2 * microbatches)):
        layers = [Layer(seed) for seed in range(count)]
        ones = copy.deepcopy(layers)
        loss_fn = nn.MSELoss(reduction=reduction)
        schedule = made(name, layers, microbatches, loss_fn, scale_grads=reduction == "mean")
        torch.manual_seed(7)
        x, target = torch.randn(2, rows, 8, dtype=torch.float64)
        listed = mine(name, world.size)
        args, kwargs = given(name, count, x, target)
        losses: list[torch.Tensor] = []
        full = nn.Sequential(*ones)
        expected = full(x)
        loss_fn(expected, target).backward()
        for times in (1.0, 2.0):
            out = schedule.step(*args, losses=losses, **kwargs)
            compare(layers, ones, listed, times)
            before = [p.grad.clone() for s in listed for p in layers[s].parameters()]
            evaluated = schedule.eval(*args)
            after = [p.grad for s in listed for p in layers[s].parameters()]
            assert all(map(torch.equal, before, after))
            if count - 1 in listed:
                torch.testing.assert_close(out, expected)
                torch.testing.assert_close(evaluated, expected)
                parts = [
                    loss_fn(a, b)
                    for a, b in zip(
                        expected.tensor_split(microbatches),
                        target.tensor_split(microbatches),
                        strict=True,
                    )
                ]
                torch.testing.assert_close(losses, parts)
            else:
                assert out is None
                assert evaluated is None
                assert losses == []
        for stage in schedule._stages.values():
            assert stage.fwd_cache == {}


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_is_one_process(ranks: Ranks, name: str) -> None:
    ranks(2, body_equal, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_on_four_ranks(ranks: Ranks, name: str) -> None:
    ranks(4, body_equal, name)


class Several(nn.Module):
    """Takes and gives several values, some of which are no tensors or get no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8).double()

    def forward(self, x: Any, extra: Any = None, scale: float = 1.0) -> Any:
        extra = {"kept": x.detach() * 0, "names": ["a", 3, None]} if extra is None else extra
        assert extra["names"] == ["a", 3, None]
        y = torch.tanh(self.layer(x)) * scale + extra["kept"]
        return y, {"kept": extra["kept"] + 1, "names": extra["names"]}


def body_pytrees(name: str) -> None:
    world = communicator()
    count = world.size * chunks_of(name)
    layers: list[nn.Module] = [Several(seed) for seed in range(count)]
    ones = copy.deepcopy(layers)
    loss_fn = lambda output, target: (output[0] - target).square().sum()  # noqa: E731
    microbatches = 4 * world.size
    schedule = made(name, layers, microbatches, loss_fn, scale_grads=False)
    torch.manual_seed(3)
    x, target = torch.randn(2, 2 * microbatches, 8, dtype=torch.float64)
    value: Any = (x, None)
    for one in ones:
        value = one(*value, scale=0.5)
    loss_fn(value, target).backward()
    args, kwargs = given(name, count, x, target, scale=0.5)
    out = schedule.step(*args, **kwargs)
    listed = mine(name, world.size)
    compare(layers, ones, listed, 1.0)
    if count - 1 in listed:
        torch.testing.assert_close(out[0], value[0])
        assert out[1]["names"] == ["a", 3, None]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_any_values_cross_stages(ranks: Ranks, name: str) -> None:
    ranks(2, body_pytrees, name)


class Join(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor, *skipped: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + sum(skipped)


def body_skips(name: str) -> None:
    """A U: early outputs are read again far behind, on other ranks and on the same."""
    world = communicator()
    count = world.size * chunks_of(name)
    layers: list[nn.Module] = [Join(seed) for seed in range(count)]
    ones = copy.deepcopy(layers)
    edges = []
    for stage in range(count):
        args = [Source(None, 0)] if stage == 0 else [Source(stage - 1, 0)]
        args += [Source(s, 0) for s in range(stage - 1) if (s + stage) % 2]
        edges.append(StageEdges(tuple(args)))
    microbatches = 4 * world.size
    schedule = made(
        name, layers, microbatches, nn.MSELoss(reduction="sum"), scale_grads=False, edges=edges
    )
    torch.manual_seed(3)
    x, target = torch.randn(2, 2 * microbatches, 8, dtype=torch.float64)
    values: list[torch.Tensor] = []
    for stage, one in enumerate(ones):
        before = [x] if stage == 0 else [values[-1]]
        before += [values[s] for s in range(stage - 1) if (s + stage) % 2]
        values.append(one(*before))
    nn.MSELoss(reduction="sum")(values[-1], target).backward()
    args, kwargs = given(name, count, x, target)
    schedule.step(*args, **kwargs)
    compare(layers, ones, mine(name, world.size), 1.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_skips(ranks: Ranks, name: str) -> None:
    ranks(4 if chunks_of(name) == 1 else 2, body_skips, name)


class Gated(nn.Module):
    """Reads what came beside x where its microbatch opens a gate, and gives a branch of its own."""

    def __init__(self, seed: int, *, detaches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.branch = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.detaches = detaches

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> Any:
        is_open = bool(x[0, 0] > 0)
        y = torch.tanh(self.layer(x))
        if is_open and beside is not None:
            y = y + beside
        branch = torch.tanh(self.branch(x))
        if self.detaches and not is_open:
            branch = branch.detach()
        # The gates of the stages behind see what this one saw.
        return torch.cat([x[:, :1].detach(), y[:, 1:]], 1), branch


GATES = {"opens late": "0011", "closes": "1100", "by turns": "0101", "closed": "0000"}


def body_gates(name: str, detaches: bool) -> None:
    world = communicator()
    count = world.size * chunks_of(name)
    microbatches = 4 * world.size
    loss_fn = lambda output, target: (output[0] - target).square().sum()  # noqa: E731
    for gates in GATES.values():
        if detaches and gates[0] == "0":
            continue
        layers: list[nn.Module] = [Gated(seed, detaches=detaches) for seed in range(count)]
        ones = copy.deepcopy(layers)
        schedule = made(name, layers, microbatches, loss_fn, scale_grads=False)
        torch.manual_seed(3)
        x, target = torch.randn(2, 2 * microbatches, 8, dtype=torch.float64)
        signs = torch.tensor([1.0 if gate == "1" else -1.0 for gate in gates])
        x[:, 0] = x[:, 0].abs() * signs.repeat_interleave(2).repeat(world.size)
        args, kwargs = given(name, count, x, target)
        for times in (1.0, 2.0):
            schedule.step(*args, **kwargs)
            for part, wanted in zip(x.split(2), target.split(2), strict=True):
                value: Any = (part,)
                for one in ones:
                    value = one(*value)
                if times == 1.0:
                    loss_fn(value, wanted).backward()
            compare(layers, ones, mine(name, world.size), times)


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("detaches", [False, True], ids=["unused", "detached"])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_gradients_may_come_in_some_microbatches_alone(
    ranks: Ranks, name: str, detaches: bool
) -> None:
    ranks(2, body_gates, name, detaches)


def body_statistics() -> None:
    """No microbatch runs twice, and random numbers are those of a plain loop."""
    world = communicator()

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()

    layers = [make(seed) for seed in range(world.size)]
    ones = copy.deepcopy(layers)
    schedule = made("1F1B", layers, 4, nn.MSELoss())
    torch.manual_seed(1)
    x = torch.randn(8, 4, dtype=torch.float64)
    state = torch.get_rng_state()
    args, kwargs = given("1F1B", world.size, x, x)
    schedule.step(*args, **kwargs)
    assert torch.equal(state, torch.get_rng_state())
    for part in x.tensor_split(4):
        nn.Sequential(*ones)(part)
    norm, expected = layers[world.rank][1], ones[world.rank][1]
    assert int(norm.num_batches_tracked) == 4
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)


def test_statistics_move_once_a_microbatch(ranks: Ranks) -> None:
    ranks(2, body_statistics)


def body_shapes() -> None:
    """Learned shapes may change from step to step, also between training and evaluation."""
    world = communicator()
    layers: list[nn.Module] = [Layer(seed) for seed in range(2 * world.size)]
    ones = copy.deepcopy(layers)
    schedule = made("ZBVZeroBubble", layers, 4, nn.MSELoss())
    for rows, width in ((8, 3), (13, 3), (8, 5), (8, 3)):
        torch.manual_seed(rows)
        x, target = torch.randn(2, rows, width, 8, dtype=torch.float64)
        args, kwargs = given("ZBVZeroBubble", len(layers), x, target)
        for parameter in (p for part in (*layers, *ones) for p in part.parameters()):
            parameter.grad = None
        out = schedule.step(*args, **kwargs)
        evaluated = schedule.eval(*args)
        expected = nn.Sequential(*ones)(x)
        nn.MSELoss()(expected, target).backward()
        compare(layers, ones, mine("ZBVZeroBubble", world.size), 1.0)
        if out is not None:
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(evaluated, expected)


@pytest.mark.backends("shm", "gloo")
def test_shapes_change(ranks: Ranks) -> None:
    ranks(2, body_shapes)


def body_frozen(name: str) -> None:
    """Parts of the model are frozen and trained again, with batches of one shape."""
    world = communicator()
    count = world.size * chunks_of(name)
    layers = [Layer(seed) for seed in range(count)]
    ones = copy.deepcopy(layers)
    schedule = made(name, layers, 4, nn.MSELoss())
    x, target = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.manual_seed(3))
    args, kwargs = given(name, count, x, target)
    for early, late in ((False, True), (True, True), (False, True), (True, False), (True, True)):
        for some in (layers, ones):
            for s, layer in enumerate(some):
                layer.requires_grad_(early if s < count // 2 else late)
                layer.zero_grad()
        schedule.step(*args, **kwargs)
        nn.MSELoss()(nn.Sequential(*ones)(x), target).backward()
        compare(layers, ones, mine(name, world.size), 1.0)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_parameters_may_be_frozen_and_trained_again(ranks: Ranks) -> None:
    for name in ("1F1B", "ZBVZeroBubble"):
        ranks(2, body_frozen, name)


def body_after_failures() -> None:
    """What a failed step has left is not taken for another schedule's, and losses are checked."""
    world = communicator()
    stage = PipelineStage(nn.Linear(4, 4).double(), world.rank, world.size, CPU)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.manual_seed(5))

    def pair(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (output - target).square().sum(), target.numel()

    for loss, rows, text in (
        (pair, 8, "a tuple, whose first value is a sum"),
        (
            lambda output, target: (output - target).square().mean(),
            4,
            "target of microbatch 0 has a shape mismatch",
        ),
    ):
        schedule = ScheduleGPipe(stage, 4, loss_fn=loss)
        args, target = ((x,), {}) if world.rank == 0 else ((), {"target": x[:rows]})
        with pytest.raises(ValueError if rows == 8 else PipeliningShapeError, match=text):
            schedule.step(*args, **target)
        world.barrier()
    for loss, value, kind, text in (
        (
            lambda output, _: output.sum().item(),
            x,
            TypeError,
            "expected loss_fn to return a tensor",
        ),
        (lambda output, _: output.mean(), 2.0, PipeliningShapeError, "outputs have 3 and 2 rows"),
    ):
        schedule = ScheduleGPipe(stage, 3, loss_fn=loss)
        args, target = ((x,), {}) if world.rank == 0 else ((), {"target": value})
        with pytest.raises(PipelinePeerError if world.rank == 0 else kind, match=text):
            schedule.step(*args, **target)
        world.barrier()
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    if world.rank == 0:
        # Gloo waits until what was sent has been received, and hears of it.
        with contextlib.suppress(PipelinePeerError):
            schedule.eval(x)
    else:
        with pytest.raises(CollectiveMismatchError, match="0 is in an evaluation and rank 1 in a"):
            schedule.step(target=x)
    world.barrier()
    y = x[:6] + 1
    out = ScheduleGPipe(stage, 4).step(*((y,) if world.rank == 0 else ()))
    again = ScheduleGPipe(stage, 2).step(*((y,) if world.rank == 0 else ()))
    if world.rank == 1:
        torch.testing.assert_close(out, again)


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_a_schedule_after_one_that_has_failed(ranks: Ranks) -> None:
    ranks(2, body_after_failures)


class Pair(NamedTuple):
    """Values under names."""

    first: torch.Tensor
    second: object


class Turned(nn.Module):
    """A stage that gives views whose memory has other values, or takes them."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.layer, self.is_first = nn.Linear(1, 1), is_first

    def forward(self, x: Any) -> Any:
        if self.is_first:
            y = torch.complex(self.layer(x), x).conj()
            return {"both": y, "one": y.imag}  # of one element: without holes
        return self.layer(x["both"].real * x["both"].imag + x["one"])


class Paired(nn.Module):
    """A stage that gives a `Pair` of pairs, or takes one."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.layer, self.is_first = nn.Linear(3, 3), is_first

    def forward(self, x: Any) -> Any:
        if self.is_first:
            y = self.layer(x)
            return Pair(y, {"more": [Pair(y.sin(), None), 2]})
        assert type(x) is Pair
        inner, factor = x.second["more"]
        assert type(inner) is Pair
        assert inner.second is None
        return self.layer(x.first * factor) + inner.first


def body_of_pairs(kind: type[Paired | Turned], x: torch.Tensor) -> None:
    world = communicator()
    torch.manual_seed(0)
    both = nn.Sequential(kind(is_first=True), kind(is_first=False)).double()
    mine = copy.deepcopy(both[world.rank])
    nn.functional.mse_loss(both(x), x).backward()
    stage = PipelineStage(mine, world.rank, world.size, CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    schedule.step(*((x,) if world.rank == 0 else ()), target=x if world.rank else None)
    for found, expected in zip(mine.parameters(), both[world.rank].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.few(1)
def test_named_tuples_cross_stages(ranks: Ranks) -> None:
    ranks(2, body_of_pairs, Paired, torch.arange(12, dtype=torch.float64).view(4, 3).sin())


@pytest.mark.few(1)
def test_conjugates_cross_stages(ranks: Ranks) -> None:
    ranks(2, body_of_pairs, Turned, torch.tensor([[0.5], [2.0]], dtype=torch.float64))


def test_classes_that_other_processes_do_not_find_do_not_cross_stages() -> None:
    class Local(NamedTuple):
        first: torch.Tensor

    for value in (Local(torch.ones(2)), torch.ones(2, 2).max(dim=1)):
        values = Values.of(([value],))
        text = "no NamedTuple .*Local is found in|cannot go to another rank: expected tuples"
        with pytest.raises(PipeliningShapeError, match=text):
            signature_of(values, "outputs").to_json()
    written = signature_of(Values.of((Pair(torch.ones(2), None),)), "outputs").to_json()
    assert Signature.from_json(json.loads(json.dumps(written))).to_json() == written
    for other in ("Pears", "pytest.exit"):  # what is no NamedTuple is not called
        missing = json.loads(json.dumps(written).replace('"Pair"', f'"{other}"'))
        with pytest.raises(PipeliningShapeError, match=f"no NamedTuple {other} is found in"):
            Signature.from_json(missing)


def body_alone() -> None:
    """What rank 0 finds wrong by itself needs no other rank; a new schedule goes on."""
    world = communicator()
    layer = Layer(world.rank)
    x = torch.randn(256, 8, dtype=torch.float64)
    stage = PipelineStage(layer, world.rank, world.size, CPU, input_args=x.chunk(4)[0])
    args = (x,) if world.rank == 0 else ()
    out = ScheduleGPipe(stage, 4).step(*args)
    for _ in range(2):
        schedule = ScheduleGPipe(stage, 4)
        again = schedule.step(*args)
        if out is not None:
            torch.testing.assert_close(again, out)
        if world.rank == 0:
            with pytest.raises(PipeliningShapeError, match="shape mismatch"):
                schedule.step(torch.randn(257, 8, dtype=torch.float64))
            with pytest.raises(PipeliningShapeError, match="dtype mismatch"):
                schedule.step(x.to(torch.int32))
            handle = layer.register_forward_hook(lambda _, __, output: output.flatten())
            with pytest.raises(PipeliningShapeError, match="shape mismatch"):
                schedule.step(x)
            handle.remove()
            handle = layer.register_forward_hook(lambda _, __, output: output.to(torch.bfloat16))
            with pytest.raises(PipeliningShapeError, match="dtype mismatch"):
                schedule.step(x)
            handle.remove()
        world.barrier()
    if world.rank:
        with pytest.raises(PipelinePeerError, match=r"rank 0 stage 0 failed in step\(\): .*shape"):
            schedule.step()


@pytest.mark.few(1)
@pytest.mark.backends("shm", "gloo")
def test_rank_0_fails_alone(ranks: Ranks) -> None:
    ranks(2, body_alone)


class Failing(nn.Module):
    """Raises in its forward or backward of one microbatch."""

    def __init__(self, phase: str, kind: type[Exception]) -> None:
        super().__init__()
        self.layer, self.phase, self.kind, self.count = nn.Linear(4, 4), phase, kind, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.phase == "forward" and self.count == 3:
            raise self.kind("planted")
        y = self.layer(x)
        if self.phase == "backward" and self.count == 3 and y.requires_grad:
            y.register_hook(self._raise)
        return y

    def _raise(self, gradient: torch.Tensor) -> None:
        raise self.kind("planted")


def body_peers(name: str, culprit: int, phase: str) -> None:
    world = communicator()
    count = world.size * chunks_of(name)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(count)]
    for s in mine(name, world.size):
        if world.rank == culprit:
            layers[s] = Failing(phase, OSError)
    schedule = made(name, layers, 4 * world.size, nn.MSELoss())
    x = torch.randn(8 * world.size, 4)
    args, kwargs = given(name, count, x, x)
    own = f"Failed to run stage backward|failed to run {phase}"
    theirs = f"rank {culprit} stage .* failed in .*: RuntimeError: .*planted"
    if world.rank == culprit:
        with pytest.raises(RuntimeError, match=own):
            schedule.step(*args, **kwargs)
    else:
        with pytest.raises(PipelinePeerError, match=theirs):
            schedule.step(*args, **kwargs)
    with pytest.raises(PipelinePeerError, match="unusable since an earlier step failed"):
        schedule.step(*args, **kwargs)


@pytest.mark.few(3)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_a_failing_stage_is_named_on_every_rank(ranks: Ranks, culprit: int, phase: str) -> None:
    ranks(2, body_peers, "InterleavedZeroBubble", culprit, phase, timeout=40)


@pytest.mark.devices("host", reason="no host waits for a device's message, and looks")
def test_ranks_that_disagree_are_named(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        stage = PipelineStage(nn.Linear(4, 4), world.rank, world.size, CPU)
        schedule = ScheduleGPipe(stage, 2 + 2 * world.rank)
        if world.rank == 0:
            # Shared memory takes small messages that nobody asks for; Gloo waits, and hears of it.
            with contextlib.suppress(PipelinePeerError):
                schedule.step(torch.ones(8, 4))
        else:
            found = r"microbatches is 4 on ranks \[1\]; 2 on ranks \[0\]"
            with pytest.raises(CollectiveMismatchError, match=found):
                schedule.step()

    ranks(2, body)


def test_stages_of_another_map_are_refused(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        loop = [PipelineStage(nn.Linear(2, 2), s, 4, CPU) for s in (world.rank, world.rank + 2)]
        with pytest.raises(ValueError, match=r"puts stages \[\d, \d\] on rank"):
            ScheduleZBVZeroBubble(loop, 4)
        with pytest.raises(ValueError, match="Stage index 4 is out of range of 4"):
            PipelineStage(nn.Linear(2, 2), 4, 4, CPU)
        with pytest.raises(RuntimeError, match="Pipeline group size 2 cannot be larger than"):
            PipelineStage(nn.Linear(2, 2), 0, 1, CPU)

    ranks(2, body)


def body_custom_dw(name: str) -> None:
    world = communicator()
    count = world.size * chunks_of(name)
    layers: list[nn.Module] = [Layer(seed) for seed in range(count)]
    calls = []
    listed = mine(name, world.size)
    stages = [
        PipelineStage(layers[s], s, count, CPU, dw_builder=lambda: lambda: calls.append(1))
        for s in listed
    ]
    kind = get_schedule_class(name)
    multi = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages if multi else stages[0], 4, loss_fn=nn.MSELoss(reduction="sum"))
    x = torch.randn(8, 8, dtype=torch.float64)
    args, kwargs = given(name, count, x, x)
    schedule.step(*args, **kwargs)
    assert len(calls) == 4 * len(listed)
    fresh = PipelineStage(layers[0], 0, count, CPU, dw_builder=lambda: lambda: None)
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        fresh.backward_weight_one_chunk(bwd_chunk_id=0)
    plain = PipelineStage(layers[0], 0, count, CPU)
    with pytest.raises(AssertionError, match="dw_builder"):
        plain.backward_one_chunk(bwd_chunk_id=0, full_backward=False)
    with pytest.raises(RuntimeError, match="Unknown backward type: half"):
        plain.backward_maybe_with_nosync("half", {"bwd_chunk_id": 0})


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
def test_weight_gradients_of_the_user(ranks: Ranks, name: str) -> None:
    ranks(2, body_custom_dw, name)


def test_names_of_schedules() -> None:
    assert get_schedule_class("gpipe") is ScheduleGPipe
    with pytest.raises(ValueError, match="Unknown schedule name 'x'. The valid options are"):
        get_schedule_class("x")
