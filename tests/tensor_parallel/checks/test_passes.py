"""Whether ranks do the same with a model that is cut, and with the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from meshwright import comm, parallelize_module
from meshwright.errors import CollectiveMismatchError, LayoutError, RankFailedError
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from meshwright.testing import Ranks
from support.late import raises_by_now
from support.tensor_parallel.samples import alike, check_alike, tensor_mesh

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


@pytest.mark.few(1)
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


@pytest.mark.few(1)
@pytest.mark.backends("gloo", "shm")
@pytest.mark.devices("host", "simulated")
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
            with pytest.raises(LayoutError, match="0.weight is .* on ranks .1.. Without a style"):
                model(X)
        for parameter in model[0].parameters():
            comm.communicator().broadcast(parameter.detach()).wait()
        model(X).sum().backward()
        with pytest.raises(RuntimeError, match=r"'1\.weight' as it was before para"):
            optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": Own()}
        parallelize_module(layers(), mesh, plan)(X)

    ranks(2, body)


@pytest.mark.few(1)
@pytest.mark.backends("gloo", "shm")
def test_a_rank_that_leaves_out_a_batch_is_stopped(ranks: Ranks) -> None:
    """It computes on other batches than the others, with as many collectives in the same order."""

    def body() -> None:
        rank = comm.communicator().rank
        _, model = two_layers()
        batches = [X + number for number in range(20)]
        if rank == 1:
            del batches[5]
        for batch in batches[:7]:
            model(batch).square().sum().backward()
        text = "pass 8 of one Sequential.* input of 0 is .*; off by .* of its norm on ranks .1."
        with raises_by_now(ValueError, match=text):
            model(batches[7])

    ranks(2, body)


class Words(nn.Module):
    """A table without a style ahead of layers that are cut, and a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.image = nn.Linear(3, 4)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.table(ids)) + self.image(pixels)


def give_other(of: str) -> None:
    """Run a model on what differs between ranks in ``of``; it is refused."""
    rank, device = comm.communicator().rank, comm.communicator().device
    torch.manual_seed(0)
    plan: dict[str, ParallelStyle] = {
        "mlp.0": ColwiseParallel(),
        "mlp.1": RowwiseParallel(),
        "image": ColwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(Words(), tensor_mesh(), plan)
    other = {of: rank}
    rows = 2 + other.get("shapes", 0)
    ids = torch.full((rows,), 1 + other.get("ids", 0), device=device)
    pixels = torch.full((rows, 3), 1.0 + other.get("pixels", 0), device=device)
    name = "image" if of == "pixels" else "mlp.0"
    text = f"declares Replicate.. in pass 1 of one Words .*the input of {name}"
    with raises_by_now(ValueError, match=text), torch.set_grad_enabled(of != "ids"):
        model(ids, pixels)


@pytest.mark.few(1)
@pytest.mark.backends("gloo", "shm")
@pytest.mark.devices("host", "simulated")
@pytest.mark.parametrize("of", ["ids", "pixels"])
def test_batches_that_a_style_declares_whole_differ_from_the_first_pass_on(
    ranks: Ranks, of: str
) -> None:
    """As where data are seeded by the global rank; also in evaluation, and ahead of a style."""
    ranks(2, partial(give_other, of))


@pytest.mark.backends("gloo", "shm")
@pytest.mark.devices("host", "simulated")
def test_batches_of_other_sizes_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    ranks(2, partial(give_other, "shapes"))


def test_a_recomputation_compares_no_inputs(ranks: Ranks) -> None:
    """Of a root whose batches have other sizes in each pass."""

    def body() -> None:
        rank = comm.communicator().rank
        layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        one, model = alike(layers)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, tensor_mesh(), plan)
        for number in range(1, 5):
            x = torch.cat([X] * number)
            found = checkpoint(model, x, use_reentrant=False)
            expected = one(x)
            torch.testing.assert_close(found, expected.chunk(2)[rank])
            found.square().sum().backward()
            expected.square().sum().backward()
        check_alike(one, model)

    ranks(2, body)


def test_ranks_may_be_given_parts(ranks: Ranks) -> None:
    """Plain ones that a style declares, and DTensors at any time."""

    def body() -> None:
        rank, mesh = comm.communicator().rank, tensor_mesh()
        cut = {"": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))}
        one, model = alike(nn.Linear(4, 4))
        parallelize_module(model, mesh, cut)
        for number in range(4):
            rows = X + number
            torch.testing.assert_close(model(rows.chunk(2)[rank]), one(rows).chunk(2)[rank])
        one, model = alike(nn.Linear(4, 4))
        parallelize_module(model, mesh, cut)
        for number in range(4):
            rows = X + number
            part = DTensor.from_local(rows.chunk(2)[rank], mesh, [Shard(0)])
            torch.testing.assert_close(model(part), one(rows).chunk(2)[rank])

    ranks(2, body)


class Scaled(nn.Module):
    """A parameter without a style that is used on features which are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.after = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.after -= 1
        return self.down(hidden * self.scale if self.after < 0 else hidden) * self.scale


def scaled(optimizer: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scaled().double()
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, tensor_mesh(), plan)
    return model, optimizer(model.parameters(), lr=0.01)


@pytest.mark.few(1)
@pytest.mark.backends("gloo", "shm")
@pytest.mark.parametrize("late", [0, 6])
def test_a_gradient_of_which_each_rank_has_a_share_is_refused(ranks: Ranks, late: int) -> None:
    """At once, or in the next step that is compared where a branch is taken later."""

    def body() -> None:
        model, optimizer = scaled(torch.optim.SGD)
        model.after = late
        for _ in range(7 if late else 0):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        model(X).square().sum().backward()
        with raises_by_now(LayoutError, match="gradient of scale is .*; off by .* on ranks .1."):
            optimizer.step()

    ranks(2, body)


def test_copies_that_a_program_updates_apart_by_hand_are_refused(ranks: Ranks) -> None:
    """Before a pass, where no optimizer of torch steps: by gradients of which ranks have shares."""

    def body() -> None:
        model, _ = scaled(torch.optim.SGD)

        def update(count: int) -> None:
            for _ in range(count):
                model(X).square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.01 * parameter.grad
                        parameter.grad = None

        model.after = 5
        update(5)
        with raises_by_now(LayoutError, match="weights .* but scale is .*; off by .* on ranks .1."):
            update(3)

    ranks(2, body)


def test_what_differs_by_rounding_alone_is_no_mistake(ranks: Ranks) -> None:
    def body() -> None:
        model, optimizer = scaled(torch.optim.Adam)
        model.after = 100
        for _ in range(2):
            model(X).square().sum().backward()
            assert model.scale.grad is not None
            model.scale.grad *= 1 + 1e-12 * comm.communicator().rank
            optimizer.step()

    ranks(2, body)


def test_parameters_that_get_memory_later_are_compared(ranks: Ranks) -> None:
    def body() -> None:
        rank = comm.communicator().rank
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        parallelize_module(model, tensor_mesh(), {"1": ColwiseParallel(), "2": RowwiseParallel()})
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
            model[0].weight += rank
        with pytest.raises(LayoutError, match="0.weight is .* on ranks .1.. Without a style"):
            model(X.float())

    ranks(2, body)


def test_a_plain_parameter_does_not_take_the_place_of_one_whose_gradient_is_summed(
    ranks: Ranks,
) -> None:
    def body() -> None:
        model = nn.Sequential(nn.LayerNorm(4))
        parallelize_module(model, tensor_mesh(), {"0": SequenceParallel()})
        model[0].weight = model[0].weight
        with pytest.raises(ValueError, match="0.weight is a DTensor, .* cannot become a plain"):
            model[0].weight = nn.Parameter(torch.ones(4))

    ranks(2, body)
