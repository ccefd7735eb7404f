"""Random values of DTensors: those of one process with the same seed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright import fully_shard
from meshwright.errors import LayoutError
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.testing import Ranks
from support.internals.comm import ProcessState, draw_whole, side_by_side

WAYS = [
    lambda t: t.normal_(0.5, 2.0),
    lambda t: t.uniform_(-1.0, 1.0),
    lambda t: t.bernoulli_(0.3),
    lambda t: t.exponential_(2.0),
    lambda t: t.log_normal_(),
    lambda t: t.random_(0, 9),
    lambda t: t.t().normal_().t(),
    lambda t: torch.bernoulli(t.fill_(0.4)),
    lambda t: t.normal_(generator=torch.Generator().manual_seed(7)),
    lambda t: nn.init.trunc_normal_(t, std=0.2),
    lambda t: nn.init.xavier_uniform_(t),
    lambda t: nn.init.kaiming_normal_(t),
    lambda t: nn.functional.dropout(t + 1.0, 0.4),
    lambda t: torch.native_dropout(t + 1.0, 0.4, True)[0],
    lambda t: torch.native_dropout(t + 1.0, 1.0, True)[0],
    lambda t: torch.native_dropout(t + 1.0, 0.4, False)[0],
    lambda t: nn.functional.rrelu(t - 1.0, training=True),
    torch.rand_like,
    lambda t: torch.randn_like(t, dtype=torch.float32),
    lambda t: torch.randint_like(t, 9),
]


def body() -> None:
    draw_whole()
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate(), side_by_side(0, 2)):
        for way in WAYS:
            found = []
            for tensor in (
                torch.zeros(4, 3, dtype=torch.float64),
                distribute_tensor(torch.zeros(4, 3, dtype=torch.float64), mesh, [placement]),
            ):
                torch.manual_seed(3)
                found.append(way(tensor))
                found.append(torch.rand(2))  # as many numbers were drawn
            assert isinstance(found[2], DTensor)
            assert found[2].placements == (placement,)
            torch.testing.assert_close(found[2].full_tensor(), found[0], rtol=0, atol=0)
            assert torch.equal(found[1], found[3])

    chances, found = torch.arange(12.0).view(4, 3), []
    for tensor in (chances, distribute_tensor(chances, mesh, [Shard(0)])):
        torch.manual_seed(3)
        picked = torch.multinomial(tensor, 2)
        found.append(
            (picked.full_tensor() if isinstance(picked, DTensor) else picked, torch.rand(2))
        )
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.devices("host", "simulated")
def test_each_rank_draws_the_whole_and_keeps_its_part(ranks: Ranks) -> None:
    ranks(2, body)


def body_of_seeds() -> None:
    """Ranks that hold the same have to draw the same; parts may be drawn apart."""
    draw_whole()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    parts = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    torch.manual_seed(rank)
    parts.normal_()
    torch.manual_seed(rank)
    assert torch.equal(parts.to_local(), torch.randn(4, 3)[2 * rank : 2 * rank + 2])
    whole = distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()])
    generator = torch.Generator()
    for draw in (
        lambda: whole.normal_(generator=generator.manual_seed(rank)),
        lambda: whole.normal_(),
    ):
        torch.manual_seed(rank)
        with pytest.raises(LayoutError, match="random state .* same on ranks .0, 1.* same seed"):
            draw()
    whole.uniform_(generator=generator.manual_seed(5))
    alone = DTensor.from_local(torch.zeros(3), DeviceMesh("cpu", [0]), [Replicate()])
    alone.normal_()  # rank 1 is not on it


@pytest.mark.devices("host", "simulated")
def test_copies_that_would_be_drawn_apart_are_refused(ranks: Ranks) -> None:
    ranks(2, body_of_seeds)


def test_the_ranks_of_a_later_run_are_asked_anew() -> None:
    """Of those some may be new, and know of nothing that was asked before."""
    process = ProcessState()
    process.drawn["a mesh"] = {(True,)}
    process.release()
    assert not process.drawn


def body_of_models() -> None:
    """Weights that are drawn, or disturbed, after sharding, as those of one process."""

    def prepared(model: nn.Module) -> nn.Module:
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for layer in model.children():
            layer.reset_parameters()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        return model

    def made() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))

    one, many = made(), made()
    fully_shard(many[0])
    fully_shard(many)
    for here, there in zip(prepared(one).parameters(), prepared(many).parameters(), strict=True):
        torch.testing.assert_close(there.full_tensor(), here, rtol=0, atol=0)


@pytest.mark.devices("host", "simulated")
def test_a_sharded_model_begins_as_one_process(ranks: Ranks) -> None:
    ranks(2, body_of_models)
