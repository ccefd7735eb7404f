"""Pipelines where torch 2.13 goes wrong, and gradients that only halves of a backward can lose."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Replicated,
    ScheduleDualPipeV,
    ScheduleLoopedBFS,
    TensorChunkSpec,
    get_schedule_class,
)
from meshwright.testing import Ranks, RanksFailed
from support.internals.pipelining import P2PTransfers
from support.internals.schedule import stage_ranks

CPU = torch.device("cpu")


def made(name: str, layers: list[nn.Module], microbatches: int, **more: Any) -> tuple[Any, Any]:
    """A schedule on all ranks, and the stages of this one."""
    world, kind = communicator(), get_schedule_class(name)
    holders = stage_ranks(world.size, len(layers), "v" if "V" in name else "loop")
    mine = [s for s, rank in enumerate(holders) if rank == world.rank]
    stages = [PipelineStage(layers[s], s, len(layers), CPU) for s in mine]
    is_multi = issubclass(kind, PipelineScheduleMulti)
    return kind(stages if is_multi else stages[0], microbatches, **more), mine


def linear(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double() for _ in range(count)]


def body_twice() -> None:
    layers = linear(2)
    schedule, mine = made("1F1B", layers, 4, loss_fn=nn.MSELoss())
    x = torch.randn(8, 4, dtype=torch.float64)
    kwargs = {"target": x} if 1 in mine else {}
    args = (x,) if 0 in mine else ()
    schedule.step(*args, **kwargs)
    (weight,) = [layers[s].weight for s in mine]
    once = weight.grad.clone()
    weight.grad = None
    schedule.step(*args, **kwargs)
    assert torch.equal(weight.grad, once)
    schedule.eval(*args)
    weight.grad = once.clone()
    for parameter in (p for s in mine for p in layers[s].parameters()):
        parameter.grad = None
    for number in (1, 2):
        schedule.step(*args, **kwargs)
        if number == 1:
            once = weight.grad.clone()
    # The sums of microbatches are made in another order: once + (a + b) or (once + a) + b.
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-15, atol=0)


def test_two_steps_give_exactly_twice_the_gradient(ranks: Ranks) -> None:
    ranks(2, body_twice)


def body_too_small() -> None:
    world = communicator()
    schedule, mine = made("GPipe", linear(world.size), 4, loss_fn=nn.MSELoss())
    x = torch.ones(3, 4, dtype=torch.float64)
    args = (x,) if 0 in mine else ()
    kwargs = {"target": x} if world.size - 1 in mine else {}
    with pytest.raises(ValueError, match=r"batch size 3 .*4 chunks|3 .* 4"):
        schedule.step(*args, **kwargs)


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_that_is_too_small_is_one_error_everywhere(ranks: Ranks, size: int) -> None:
    ranks(size, body_too_small, timeout=20)


class Adding(nn.Module):
    """Takes one argument more, with a default."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: torch.Tensor, more: Any = 0) -> torch.Tensor:
        return self.first(x) + more


def body_counts() -> None:
    """Ends with a refusal that all ranks hear, in the step or before they come to it."""
    world = communicator()
    schedule, mine = made("GPipe", [*map(Adding, linear(world.size))], 2, loss_fn=nn.MSELoss())
    x = torch.ones(4, 4, dtype=torch.float64)
    is_first, is_last = 0 in mine, world.size - 1 in mine
    for args in ((x,), (x, x)):
        schedule.step(*(args if is_first else ()), **({"more": 2} if is_last else {}), target=x)
    wrong: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        ((), {}, r"\(x, more\) of Adding, .*0 positional arguments: missing.*'x'"),
        ((x, x, x), {}, "got 3 positional arguments: too many"),
        ((x,), {"other": x}, r"1 positional arguments and the keywords \['other'\]: .*'other'"),
        ((x, x), {"more": x}, "got 2 positional .* multiple values for argument 'more'"),
    )
    for args, kwargs, text in wrong if is_first else ():
        with pytest.raises(ValueError, match=text):
            schedule.step(*args, target=x, **kwargs)
        with pytest.raises(ValueError, match=text):
            schedule.step_microbatches([args] * 2, [kwargs] * 2, [x[:2], x[2:]])
    world.barrier()  # who comes later to a step that was refused hears of the first refusal
    if is_last:
        with pytest.raises(ValueError, match=r"Stage \d.*this step got the keywords \['other'\]"):
            schedule.step(target=x, other=x)
        with pytest.raises(
            RuntimeError, match="needs a target .* 1 positional .*: name it target="
        ):
            schedule.step(x)
    world.barrier()
    schedule.step(*((x, x, x) if is_first else ()), target=x)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_wrong_arguments_are_one_error_everywhere(ranks: Ranks, size: int) -> None:
    with pytest.raises(RanksFailed, match=f"^{size} of {size} ranks failed; rank 0") as failed:
        ranks(size, body_counts, timeout=60)
    for outcome in failed.value.outcomes:
        assert "[Stage 0] expects the arguments (x, more) of Adding" in str(outcome.exception)


class Noted(nn.Module):
    """Notes in which order it runs forwards and backwards."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.layer, self.order, self.count = nn.Linear(4, 4), order, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, self.count = self.count, self.count + 1
        self.order.append(f"F{number}")
        y = self.layer(x)
        y.register_hook(lambda _: self.order.append(f"B{number}"))
        return y


def body_order() -> None:
    world = communicator()
    order: list[str] = []
    layers: list[nn.Module] = [Noted(order) for _ in range(world.size)]
    schedule, mine = made("1F1B", layers, 5, loss_fn=nn.MSELoss())
    x = torch.ones(5, 4)
    kwargs = {"target": x} if world.size - 1 in mine else {}
    schedule.step(*((x,) if 0 in mine else ()), **kwargs)
    shown = [str(action)[1:] for action in schedule.schedule.actions(world.rank)]
    assert order == shown
    assert sorted(shown) == sorted(f"{kind}{k}" for kind in "FB" for k in range(5))


def test_the_order_shown_is_the_order_run(ranks: Ranks) -> None:
    ranks(4, body_order)


def test_names_and_chunk_specs_of_schedules(ranks: Ranks) -> None:
    def body() -> None:
        world = communicator()
        stage = PipelineStage(nn.Linear(2, 2), world.rank, 2, CPU)
        with pytest.raises(ValueError, match="DualPipeV requires exactly 2 stages per rank, but"):
            ScheduleDualPipeV([stage], 4)
        spec = (TensorChunkSpec(1),)
        schedule = ScheduleLoopedBFS([stage], 2, None, spec, output_merge_spec=TensorChunkSpec(1))
        stage.submod = nn.Tanh()
        x = torch.arange(12.0).view(3, 4)
        out = schedule.step(*((x,) if world.rank == 0 else ()))
        if world.rank:
            torch.testing.assert_close(out, torch.tanh(torch.tanh(x)))

    ranks(2, body)


def body_buffers() -> None:
    """After each receive, how many of those so far are still held."""
    schedule, mine = made("1F1B", linear(2), 16, loss_fn=nn.MSELoss())
    x = torch.ones(16, 4, dtype=torch.float64)
    args, kwargs = ((x,), {}) if 0 in mine else ((), {"target": x})
    held: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    take_outputs = P2PTransfers.take_outputs

    def counted(self: P2PTransfers, leg: Any) -> Any:
        values = take_outputs(self, leg)
        held.extend(weakref.ref(leaf) for leaf in values.leaves)
        most[0] = max(most[0], sum(ref() is not None for ref in held))
        return values

    gc.disable()
    try:
        P2PTransfers.take_outputs = counted  # pyrefly: ignore[bad-assignment]
        schedule.step(*args, **kwargs)
    finally:
        P2PTransfers.take_outputs = take_outputs
        gc.enable()
    if 1 in mine:
        assert len(held) == 16
        assert most[0] <= 2  # one in use, one that was just received
    assert sum(ref() is not None for ref in held) <= 1


def test_receive_buffers_are_those_in_flight(ranks: Ranks) -> None:
    ranks(2, body_buffers)


class Views(nn.Module):
    """Its outputs are views: of what it computes, and of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8).double()

    def forward(self, x: torch.Tensor, passed: torch.Tensor | None = None) -> Any:
        both = self.layer(x).view(-1, 2, 4)
        first, second = both.unbind(1)
        return first.t().t() + (0 if passed is None else passed), second[:, :]


def body_views(name: str) -> None:
    world = communicator()
    count = 2 * world.size
    torch.manual_seed(0)
    layers: list[nn.Module] = [Views() for _ in range(count)]
    loss_fn = lambda output, target: (output[0] * output[1] - target).square().sum()  # noqa: E731
    schedule, mine = made(name, layers, 4, loss_fn=loss_fn, scale_grads=False)
    x, target = torch.randn(2, 8, 4, dtype=torch.float64)
    kwargs = {"target": target} if count - 1 in mine else {}
    schedule.step(*((x,) if 0 in mine else ()), **kwargs)
    found = [p.grad.clone() for s in mine for p in layers[s].parameters()]
    for layer in layers:
        layer.zero_grad()
    value: Any = (x,)
    for layer in layers:
        value = layer(*value)
    loss_fn(value, target).backward()
    for a, b in zip(found, (p for s in mine for p in layers[s].parameters()), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-10, atol=1e-12)


def test_views_between_stages(ranks: Ranks) -> None:
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        ranks(2, body_views, name)


class Prompted(nn.Module):
    """Reads values of the batch that are trained, and gives what it received on as it is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 6).double()

    def forward(
        self, x: torch.Tensor, first: torch.Tensor | None = None, *, prompt: Any, rows: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = x if first is None else first
        return torch.tanh(self.layer(x) + prompt) * rows + first, first


def body_prompted(name: str) -> None:
    """All gradients are those of one process: of what is passed on, and of the batch."""
    layers: list[nn.Module] = [Prompted(seed) for seed in range(4)]
    ones = copy.deepcopy(layers)
    x, target = torch.randn(2, 9, 6, dtype=torch.float64, generator=torch.manual_seed(3))
    leaves = [x, torch.randn(6, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)]
    mine_of_batch = [leaf.clone().requires_grad_() for leaf in leaves]
    batch, prompt, rows = mine_of_batch

    def loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return (output[0] - target).square().mean() + (output[1] * target).mean()

    spec = {"prompt": Replicated, "rows": TensorChunkSpec(0)}
    schedule, mine = made(name, layers, 4, loss_fn=loss, kwargs_chunk_spec=spec)
    last = {"target": target} if 3 in mine else {}
    schedule.step(*((batch,) if 0 in mine else ()), prompt=prompt, rows=rows, **last)

    start = leaves[0].clone().requires_grad_()
    value: tuple[torch.Tensor, ...] = (start,)
    given = [[leaf.clone().requires_grad_() for leaf in leaves[1:]] for _ in ones]
    for one, (a, b) in zip(ones, given, strict=True):
        value = one(*value, prompt=a, rows=b)
    loss((value[0], value[1]), target).backward()
    expected = [sum(given[s][number].grad for s in mine) for number in (0, 1)]
    if 0 in mine:
        expected.append(start.grad)
    found = [prompt.grad, rows.grad, batch.grad]
    for s in mine:
        expected += [parameter.grad for parameter in ones[s].parameters()]
        found += [parameter.grad for parameter in layers[s].parameters()]
    found = [gradient for gradient in found if gradient is not None]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_what_is_passed_on_and_the_batch_get_their_gradients(ranks: Ranks, name: str) -> None:
    ranks(2, body_prompted, name)


class Scaled(nn.Linear):
    """Over batches that lie along dim 1, with a scale for all of them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(6, 6, dtype=torch.float64)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(super().forward(x)) * scale
        return (y if bias is None else y + bias), scale


def body_along_1() -> None:
    """A batch along dim 1, its target too; specs of what only one rank is given are no error."""
    world, name = communicator(), "ZBVZeroBubble"
    layers: list[nn.Module] = [Scaled(seed) for seed in range(4)]
    ones = copy.deepcopy(layers)
    torch.manual_seed(5)
    x, target = torch.randn(8, 10, 6, dtype=torch.float64), torch.randint(0, 6, (8, 10))
    scale, bias = torch.randn(2, 8, 1, 1, dtype=torch.float64)

    def loss(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output[0].flatten(0, 1), target.flatten())

    along_1 = TensorChunkSpec(1)
    more: dict[str, Any] = {
        "loss_fn": loss,
        "args_chunk_spec": (along_1, Replicated),
        "kwargs_chunk_spec": {"bias": Replicated},
        "output_merge_spec": (along_1, None),
    }
    mine = [0, 3] if world.rank == 0 else [1, 2]
    declared = {0: (x[:, :3], scale)}
    stages = [PipelineStage(layers[s], s, 4, CPU, input_args=declared.get(s)) for s in mine]
    kind = get_schedule_class(name)
    args: dict[str, Any] = {"bias": bias} if world.rank else {"target": target}
    batch = () if world.rank else (x, scale)
    with pytest.raises(ValueError, match=r"nothing says how the target of shape \[8, 10\]"):
        kind(stages, 4, **more).step(*batch, **args)
    out = kind(stages, 4, target_chunk_spec=along_1, **more).step(*batch, **args)

    value: tuple[torch.Tensor, ...] = (x, scale)
    for s, one in enumerate(ones):
        value = one(*value, **({"bias": bias} if s in (1, 2) else {}))
    loss(value, target).backward()
    for s in mine:
        for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
    if out is not None:
        torch.testing.assert_close(out[0], value[0])


def test_batches_along_another_dim(ranks: Ranks) -> None:
    ranks(2, body_along_1)
