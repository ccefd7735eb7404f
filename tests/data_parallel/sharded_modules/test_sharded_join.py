"""Uneven inputs of sharded and hybrid modules, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import fully_shard
from meshwright.errors import CollectiveMismatchError
from meshwright.fsdp import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
)
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

Build = Callable[[nn.Module], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.last = nn.Linear(5, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def sharded(model: nn.Module) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def hybrid(model: nn.Module) -> Any:
    world = communicator()
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_blocks(model: nn.Module) -> Any:
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    return fully_shard(model)


def facade(model: nn.Module) -> Any:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy)


def facade_hybrid(model: nn.Module) -> Any:
    world = communicator()
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        use_orig_params=True,
    )


BUILDS: list[Build] = [sharded, hybrid, facade, facade_hybrid]


def data(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * rank + step)
    return torch.randn(4, 5, dtype=torch.float64)


def train_together(model: nn.Module, counts: Sequence[int], divides_by_all: bool) -> None:
    """What join promises, in one process: the sum over ranks that train, divided as asked."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        for rank in active:
            part = model(data(rank, step)).square().mean()
            (part / (len(counts) if divides_by_all else len(active))).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def same(ours: Any, one: nn.Module) -> None:
    if isinstance(ours, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(ours):
            for a, b in zip(ours.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(a.reshape(b.shape), b)
        return
    for a, b in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def body_uneven(counts: Sequence[int], builds: Sequence[Build]) -> None:
    world = communicator()
    for build in builds:
        for divides_by_all in (True, False):
            one = Net()
            ours = build(copy.deepcopy(one))
            optimizer = torch.optim.Adam(ours.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            with ours.join(divides_by_all, optimizers=[optimizer] if 0 in counts else ()):
                for step in range(counts[world.rank]):
                    # Zeroed before the backward pass, so that a rank that is done still has some.
                    optimizer.zero_grad()
                    ours(data(world.rank, step)).square().mean().backward()
                    with torch.no_grad():
                        ours(data(world.rank, step))
                    optimizer.step()
                    scheduler.step()
            train_together(one, counts, divides_by_all)
            same(ours, one)
            optimizer.zero_grad()
            one.zero_grad()
            # The next iterations are even, and checked again.
            for rank in range(world.size):
                (one(data(rank, 50)).square().mean() / world.size).backward()
            ours(data(world.rank, 50)).square().mean().backward()
            if not isinstance(ours, FullyShardedDataParallel):
                for a, b in zip(ours.parameters(), one.parameters(), strict=True):
                    torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.few(1)
@pytest.mark.parametrize("counts", [[1, 3], [2, 0]], ids=str)
def test_uneven_inputs(ranks: Ranks, counts: list[int]) -> None:
    ranks(2, body_uneven, counts, BUILDS)


@pytest.mark.slow
def test_uneven_inputs_on_four_ranks(ranks: Ranks) -> None:
    ranks(4, body_uneven, [1, 3, 2, 3], [sharded, in_blocks, hybrid, facade_hybrid])


def body_accumulation() -> None:
    """Passes without a reduction, and reductions without the second sum, end in the same step."""
    world = communicator()
    one = Net()
    ours = hybrid(copy.deepcopy(one))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, ours)]
    counts = [1, 3]
    with ours.join():
        for step in range(counts[world.rank]):
            with ours.no_sync():
                ours(data(world.rank, step)).square().mean().backward()
            ours.set_requires_all_reduce(False)
            ours(data(world.rank, step + 10)).square().mean().backward()
            ours.set_requires_all_reduce(True)
            ours(data(world.rank, step + 20)).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    for step in range(3):
        for rank in range(world.size):
            if step < counts[rank]:
                for number in (step, step + 10, step + 20):
                    (one(data(rank, number)).square().mean() / world.size).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    same(ours, one)


def body_throw() -> None:
    world = communicator()
    ours = sharded(Net())
    done = 0

    def train() -> None:
        nonlocal done
        with ours.join(throw_on_early_termination=True):
            for step in range(2 + world.rank):
                ours(data(world.rank, step)).square().mean().backward()
                done += 1

    text = "Rank 0 exhausted all inputs" if world.rank == 0 else "Detected at least one rank that"
    with pytest.raises(RuntimeError, match=text):
        train()
    assert done == 2
    ours(data(0, 0)).sum().backward()


def body_refusals() -> None:
    world = communicator()
    ours = sharded(Net())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with observe(recorder := Recorder()), ours.join(enable=False):
        ours(data(0, 0)).sum().backward()
    assert "uneven inputs" not in {label for _, label in recorder.kinds()}
    with pytest.raises(ValueError, match="join needs the sharded root, found a FSDPLinear"):
        ours.layers[0].join().__enter__()

    def diverge() -> None:
        with ours.join():
            if world.rank == 0:
                optimizer.step()
            else:
                ours(data(0, 0))

    with pytest.raises(CollectiveMismatchError, match="STEP on ranks .0.; UNSHARD"):
        diverge()


def body_unknown_optimizer() -> None:
    """A rank without any batch cannot know the optimizers: it says so, and the others learn it."""
    world = communicator()
    ours = sharded(Net())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with ours.join():
        if world.rank == 0:
            ours(data(0, 0)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    "body",
    [body_accumulation, body_throw, body_refusals],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
@pytest.mark.few(1)
def test_join(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)


def test_a_rank_without_batches_needs_the_optimizers(ranks: Ranks) -> None:
    with pytest.raises(Exception, match=r"Pass join\(optimizers=\[...\]\) on every rank"):
        ranks(2, body_unknown_optimizer)


def body_clipped() -> None:
    world = communicator()
    counts = (1, 3)
    one = Net()
    ours = facade(copy.deepcopy(one))
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, one))
    with ours.join():
        for step in range(counts[world.rank]):
            mine.zero_grad()
            ours(data(world.rank, step)).square().mean().backward()
            ours.clip_grad_norm_(0.05)
            mine.step()
    for step in range(max(counts)):
        theirs.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                (one(data(rank, step)).square().mean() / world.size).backward()
        assert torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05) > 0.05
        theirs.step()
    same(ours, one)
    scaler = ShardedGradScaler()
    with ours.join():
        mine.zero_grad()
        scaler.scale(ours(data(world.rank, 0)).square().mean()).backward()
        with pytest.raises(RuntimeError, match="ShardedGradScaler does not work inside join"):
            scaler.step(mine)


def test_clipping_is_joined_and_scaling_is_refused(ranks: Ranks) -> None:
    ranks(2, body_clipped)
