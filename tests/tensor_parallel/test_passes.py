"""Whether ranks that go on after an exception begin the same pass of a model that is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright import comm, parallelize_module
from meshwright.errors import CollectiveMismatchError, LayoutError, RankFailedError
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from meshwright.testing import Ranks
from tensor_parallel.samples import alike, check_alike, tensor_mesh

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def two_layers() -> tuple[nn.Module, nn.Module]:
    """Two MLPs that send tensors of one shape, forward and backward; one whole, one cut."""
    one, many = alike(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    rows, columns = RowwiseParallel(), ColwiseParallel()
    plan = {"0": columns, "1": rows, "2": columns, "3": rows}
    return one, parallelize_module(many, tensor_mesh(), plan)


def give_up_in_the_loss(model: nn.Module) -> None:
    model(X).square().sum()
    raise KeyError("a bad row")


def give_up_between_layers(model: nn.Module) -> None:
    model[1](model[0](X))
    raise KeyError("a bad row")


@pytest.mark.backends("gloo", "shm")
@pytest.mark.parametrize(
    "give_up",
    [
        give_up_in_the_loss,
        pytest.param(give_up_between_layers, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_gave_up_a_pass_alone_is_stopped(
    ranks: Ranks, give_up: Callable[[nn.Module], None]
) -> None:
    """Before it sends what the others would add to what they wait for, of the same shape."""

    def body() -> None:
        _, model = two_layers()
        text = "(forward pass of Sequential|rank 1 raised in a pass or left out a part)"
        for _ in range(5):
            model(X).square().sum().backward()
        if comm.communicator().rank == 1:
            with pytest.raises(KeyError):
                give_up(model)
            with pytest.raises(CollectiveMismatchError, match=text):
                model(X)
        else:
            with pytest.raises(RankFailedError, match=f"rank 1 failed first.*{text}"):
                model(X).square().sum().backward()

    ranks(2, body)


@pytest.mark.backends("gloo", "shm")
def test_ranks_that_do_the_same_go_on(ranks: Ranks) -> None:
    """Evaluation, accumulation, and a pass that all of them give up in one place."""

    def body() -> None:
        one, many = two_layers()
        for step in range(6):
            if step % 3 == 1:
                with torch.no_grad():
                    torch.testing.assert_close(many(X), one(X))
            if step % 3 == 2:
                for model in (one, many):
                    with pytest.raises(KeyError):
                        give_up_in_the_loss(model)
                    model.zero_grad()
            for model in (one, many):
                for _ in range(1 + step % 2):
                    model(X).square().sum().backward()
        check_alike(one, many)

    ranks(2, body)


class Own(ParallelStyle):
    """Leaves to each rank what it has."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def test_what_a_first_step_would_train_apart_or_not_at_all_is_refused(ranks: Ranks) -> None:
    def body() -> None:
        rank, mesh = comm.communicator().rank, tensor_mesh()
        plan: dict[str, ParallelStyle] = {"1": ColwiseParallel(), "2": RowwiseParallel()}

        def layers() -> nn.Module:
            torch.manual_seed(rank)  # a seed for each rank, which is forgotten where there is none
            return nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(3)))

        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallelize_module(model, mesh, plan)
        for _ in range(2):
            with pytest.raises(LayoutError, match="expected 0.weight to be equal .* has no style"):
                model(X)
        for parameter in model[0].parameters():
            comm.communicator().broadcast(parameter.detach()).wait()
        model(X).sum().backward()
        with pytest.raises(RuntimeError, match="4 parameters of a SGD, 1.weight first, .* before"):
            optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        own = parallelize_module(layers(), mesh, {**plan, "0": Own()})
        own(X)

    ranks(2, body)
