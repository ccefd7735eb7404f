"""What ranks of a model that is cut may be given, and may find, without being stopped for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import comm, flat_groups, parallelize_module
from meshwright.comm import LateNumbers, phase
from meshwright.errors import CollectiveMismatchError, LayoutError, RankFailedError
from meshwright.gradients import beyond_rounding, is_due
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel
from meshwright.testing import Ranks, RanksFailed
from support.internals.comm import singles_of
from support.internals.tensor_parallel import look_at_bits
from support.late import raises_by_now
from support.tensor_parallel.samples import tensor_mesh

LAYERS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def test_compared_are_powers_of_two_and_later_some_between() -> None:
    assert [number for number in range(1, 40) if is_due(number)] == [1, 2, 4, 8, 16, 32]
    assert [number for number in range(513, 5000) if is_due(number)] == [1024, 2048, 3072, 4096]


def test_what_is_not_finite_is_compared_apart() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf"), 3.0])
    assert beyond_rounding(one, one * (1 + 1e-6), 0.0) == 0.0
    assert 0 < beyond_rounding(torch.where(one == 3, 2.0, one), one, 0.0) < 1
    assert beyond_rounding(one.nan_to_num(), one, 0.0) == float("inf")


def test_where_rows_of_a_sparse_tensor_lie_counts() -> None:
    one, other = ((torch.eye(4, 2) * torch.eye(2)[row]).to_sparse(1) for row in (0, 1))
    digests: list[str] = []
    named = [("one", one), ("its copy", one.clone()), ("other", other)]
    look_at_bits(named, LateNumbers(), lambda _, said: digests.extend(said), is_late=False)
    assert digests[0] == digests[1] != digests[2]


class Cached(nn.Module):
    """Gives what it keeps of a token, cut by features, back to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(
        self, x: torch.Tensor, kept: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x) if kept is None else self.up(x) + kept
        return self.down(hidden), hidden.detach()


class Scale(nn.Module):
    """Computes on a DTensor that is cut, so that the gradient of its parameter is a partial sum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(
            distribute_tensor(torch.ones(size), tensor_mesh(), [Replicate()])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def a_cache_that_is_given_back() -> None:
    model, kept = parallelize_module(Cached(), tensor_mesh(), LAYERS), None
    for step in range(5):
        _, kept = model(torch.full((2, 4), 0.5 + step), kept)


def a_layer_that_begins_with_zeros() -> None:
    layer = nn.Linear(4, 4)
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    parallelize_module(layer, tensor_mesh(), style)
    layer(torch.zeros(3, 4))
    for step in range(4):
        layer(torch.full((3, 4), float(comm.communicator().rank)) + step)


def a_partial_gradient() -> None:
    mesh, rank = tensor_mesh(), comm.communicator().rank
    model = parallelize_module(nn.Sequential(Scale(4), nn.Linear(4, 4)), mesh, {})
    optimizer = torch.optim.SGD([model[0].factor], lr=0.1)
    whole = torch.arange(1.0, 17.0).view(4, 4)
    for _ in range(2):
        model[0](distribute_tensor(whole, mesh, [Shard(0)])).sum().full_tensor().backward()
        assert model[0].factor.grad.placements[0].is_partial()
        optimizer.step()
        optimizer.zero_grad()
    expected = 1 - 2 * 0.1 * whole.sum(0)
    torch.testing.assert_close(model[0].factor.to_local(), expected, msg=f"rank {rank}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "program", [a_cache_that_is_given_back, a_layer_that_begins_with_zeros, a_partial_gradient]
)
def test_nothing_is_refused_that_is_right(ranks: Ranks, program: Callable[[], None]) -> None:
    ranks(2, program)


@pytest.mark.slow
def test_a_rank_that_takes_its_time_is_waited_for(ranks: Ranks) -> None:
    """As in a collective: longer than the bound of waits, in a phase with one of its own."""

    def body() -> None:
        model = parallelize_module(Cached(), tensor_mesh(), LAYERS)
        comm.communicator(tensor_mesh().get_group(), "tensor").timeout = 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4))[0].sum().backward()
        if comm.communicator().rank == 1:
            with phase("write logs", limit=60):
                time.sleep(1.2)
        optimizer.step()

    ranks(2, body)


@pytest.mark.slow
@pytest.mark.backends("gloo", "shm")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_does_not_come_is_named(ranks: Ranks, is_killed: bool) -> None:
    """Where the others compare values: it has left the run, or its process has ended."""

    def body() -> None:
        model = parallelize_module(Cached(), tensor_mesh(), LAYERS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4))[0].sum().backward()
        if comm.communicator().rank == 0:
            optimizer.step()
        elif is_killed:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=15.0)
    error = caught.value.outcomes[0].exception
    if is_killed:
        assert isinstance(error, RankFailedError) and "rank 1" in str(error)
    else:
        assert isinstance(error, CollectiveMismatchError)
        assert "ranks [1] leave the run, where rank 0 is at step 1 of a SGD" in str(error)


def test_flat_parameters_are_compared_one_by_one(ranks: Ranks) -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), Cached())
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        parallelize_module(model, tensor_mesh(), {f"1.{name}": s for name, s in LAYERS.items()})
        optimizer = torch.optim.SGD(flat_groups(model), lr=0.1)
        model(torch.ones(2, 4))[0].sum().backward()
        assert model[0].bias.grad is not None
        model[0].bias.grad *= 1 + comm.communicator().rank
        with raises_by_now(LayoutError, match=r"the gradient of 0.bias is .*; off by"):
            optimizer.step()

    ranks(2, body)


@pytest.mark.devices("host", "simulated")
def test_a_copy_that_one_rank_writes_is_named(ranks: Ranks) -> None:
    """Ahead of layers that are cut it parts in silence: sums give all ranks the same gradients."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), Cached())
        parallelize_module(model, tensor_mesh(), {f"1.{name}": s for name, s in LAYERS.items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.arange(8.0, device=comm.communicator().device).view(2, 4)

        def step() -> None:
            model(x)[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if comm.communicator().rank:
            with torch.no_grad():
                model[0].weight.mul_(1.5)
        with raises_by_now(LayoutError, match=r"weights .* but 0.weight is .*; off by 0.5"):
            step()

    ranks(2, body)


@pytest.mark.slow
def test_all_ranks_cut_flat_parameters_alike(ranks: Ranks) -> None:
    """Also where one rank has a little less of a layer than the others."""

    def body() -> list[list[str]]:
        model = nn.Sequential(nn.Linear(1024, 2047), nn.Linear(2047, 1))
        parallelize_module(model, tensor_mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names[id(p)] for p in singles_of(flat)] for flat in flat_groups(model)]

    one, other = ranks(2, body)
    assert one == other == [["0.weight"], ["0.bias", "1.weight"], ["1.bias"]]
