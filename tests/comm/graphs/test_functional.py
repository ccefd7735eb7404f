"""Autograd's collectives: each backward is the adjoint, in eager mode and in traced graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.testing import Ranks
from support.internals.comm import functional

pytestmark = pytest.mark.backends("shm", "gloo")

Operation = Callable[[torch.Tensor, comm.Communicator], torch.Tensor]


def _reduce(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
    return functional.all_reduce(x, world, label="f")


def _gather(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
    return functional.all_gather(x, world, dim=1, label="f")


def _scatter(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
    return functional.reduce_scatter(x, world, dim=1, label="f")


def _exchange(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
    return functional.all_to_all(x, world, label="f")


def _uneven(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
    # Rank 0 keeps one row of its four and gives three away; rank 1 the same.
    to_go = [1, 3] if world.rank == 0 else [3, 1]
    to_come = [1, 3] if world.rank == 0 else [3, 1]
    return functional.all_to_all(x, world, output_splits=to_come, input_splits=to_go, label="f")


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "all_to_all uneven": _uneven,
}


def check_adjoint(operation: Operation, run: Operation) -> tuple[float, float]:
    """<A x, y> and <x, A* y>, both summed over the ranks; equal for an adjoint."""
    world = comm.communicator()
    torch.manual_seed(world.rank)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    out = run(x, world)
    y = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, y)
    pair = torch.stack([(out * y).sum().detach(), (x * grad).sum().detach()])
    total = world.all_reduce(pair).wait()
    assert total is not None
    assert torch.equal(operation(x.detach(), world), out.detach())
    return total[0].item(), total[1].item()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_is_the_adjoint(ranks: Ranks, name: str) -> None:
    for left, right in ranks(2, check_adjoint, OPERATIONS[name], OPERATIONS[name]):
        assert left == pytest.approx(right, rel=1e-12)


def test_every_call_passes_the_door(ranks: Ranks) -> None:
    def body() -> list[tuple[str, str]]:
        world = comm.communicator()
        x = torch.ones(2, 2, requires_grad=True)
        with observe(recorder := Recorder()):
            functional.all_gather(x, world, label="unshard w").sum().backward()
        return recorder.kinds()

    expected = [("all_gather", "unshard w"), ("reduce_scatter", "unshard w")]
    assert ranks(2, body) == [expected] * 2


def test_sizes_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    def body() -> None:
        world = comm.communicator()
        with pytest.raises(ValueError, match=r"expected dim 1 to divide by 2 ranks, found shape"):
            functional.reduce_scatter(torch.ones(2, 3), world, dim=1)
        with pytest.raises(ValueError, match=r"a dim 0 that divides by 2 ranks, found shape"):
            functional.all_to_all(torch.ones(3), world)
        with pytest.raises(ValueError, match=r"both splits, .* None and input"):
            functional.all_to_all(torch.ones(4), world, input_splits=[1, 3])

    ranks(2, body)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_equals_eager_and_traces_into_one_graph(ranks: Ranks, name: str) -> None:
    def body(operation: Operation) -> tuple[float, float]:
        def doubled(x: torch.Tensor, world: comm.Communicator) -> torch.Tensor:
            return operation(x * 2, world) / 2

        compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
        return check_adjoint(operation, compiled)

    for left, right in ranks(2, body, OPERATIONS[name], timeout=120):
        assert left == pytest.approx(right, rel=1e-12)
