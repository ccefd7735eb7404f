"""Uneven inputs: ranks with different numbers of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.comm import Recorder, communicator, observe
from meshwright.data_parallel import DistributedDataParallel, keep_batch_norm_local, replicate
from meshwright.data_parallel.comm_hooks import allreduce_hook
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks

Wrap = Callable[..., nn.Module]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * rank + step)
    return torch.randn(4, 3, dtype=torch.float64)


def train_together(model: nn.Module, counts: list[int], divides_by_all: bool) -> None:
    """What join promises, in one process: the sum over ranks that train, divided as asked."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        for rank in active:
            part = model(data(rank, step)).square().mean()
            (part / (len(counts) if divides_by_all else len(active))).backward()
        optimizer.step()
        optimizer.zero_grad()


def body_uneven(
    wrap: Wrap, counts: list[int], divides_by_all: bool, options: dict[str, object], hooked: bool
) -> None:
    world = communicator()
    one = build()
    ours = wrap(copy.deepcopy(one), **options)
    if hooked:
        ours.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with ours.join(divide_by_initial_world_size=divides_by_all):
        for step in range(counts[world.rank]):
            ours(data(world.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    train_together(one, counts, divides_by_all)
    for a, b in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    ours(data(0, 0)).sum().backward()


WRAPS = pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate], ids=["class", "fn"])


@pytest.mark.few(5)
@WRAPS
@pytest.mark.parametrize("divides_by_all", [True, False])
@pytest.mark.parametrize("counts", [[2, 5], [4, 1], [3, 3], [0, 2]], ids=str)
def test_uneven_inputs(ranks: Ranks, wrap: Wrap, counts: list[int], divides_by_all: bool) -> None:
    ranks(2, body_uneven, wrap, counts, divides_by_all, {}, False)


def test_uneven_inputs_on_three_ranks(ranks: Ranks) -> None:
    ranks(3, body_uneven, DistributedDataParallel, [1, 4, 2], False, {"bucket_cap_mb": 5e-5}, False)


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["view", "static"],
)
def test_uneven_inputs_with_options(ranks: Ranks, options: dict[str, object]) -> None:
    ranks(2, body_uneven, DistributedDataParallel, [1, 3], True, options, False)


def test_uneven_inputs_with_a_hook(ranks: Ranks) -> None:
    ranks(2, body_uneven, DistributedDataParallel, [3, 1], True, {}, True)


def body_buffers() -> None:
    """The ranks that still train give the buffers; in the end all have them."""
    world = communicator()
    ours = DistributedDataParallel(nn.BatchNorm1d(3).double())
    keep_batch_norm_local(ours)
    with ours.join():
        for step in range(2 + 2 * world.rank):
            ours(data(world.rank, step)).square().sum().backward()
    found = world.gather_bytes(ours.module.running_mean.numpy().tobytes(), label="check")
    assert found[0] == found[1]
    assert ours.module.num_batches_tracked.item() == 4


def body_accumulation_and_evaluation() -> None:
    world = communicator()
    one = build()
    ours = DistributedDataParallel(copy.deepcopy(one))
    counts = [1, 3]
    with ours.join():
        for step in range(counts[world.rank]):
            ours.zero_grad()
            with ours.no_sync():
                ours(data(world.rank, step)).square().mean().backward()
            with torch.no_grad():
                ours(data(world.rank, step))
            ours(data(world.rank, step + 10)).square().mean().backward()
    if world.rank == 1:
        for number in (2, 12):
            (one(data(1, number)).square().mean() / 2).backward()
        for a, b in zip(ours.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def body_throw() -> None:
    world = communicator()
    ours = DistributedDataParallel(build())
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
    with ours.join(throw_on_early_termination=True):
        ours(data(0, 0)).sum().backward()


def body_disabled_and_raising() -> None:
    ours = DistributedDataParallel(build())
    with observe(recorder := Recorder()), ours.join(enable=False):
        ours(data(0, 0)).sum().backward()
    assert {kind for kind, _ in recorder.kinds()} == {"all_reduce"}
    with pytest.raises(ValueError, match="planted"), ours.join():
        raise ValueError("planted")
    ours(data(0, 0)).sum().backward()


def body_different_work() -> None:
    world = communicator()
    ours = DistributedDataParallel(nn.BatchNorm1d(3).double())
    keep_batch_norm_local(ours)
    value = ours(data(0, 0)).sum()

    def diverge() -> None:
        with ours.join():
            if world.rank == 0:
                value.backward()
            else:
                ours(data(0, 0))

    with pytest.raises(CollectiveMismatchError, match="REDUCE on ranks .0.; BROADCAST_BUFFERS on"):
        diverge()


@pytest.mark.parametrize(
    "body",
    [
        body_buffers,
        body_accumulation_and_evaluation,
        body_throw,
        body_disabled_and_raising,
        body_different_work,
    ],
    ids=lambda body: body.__name__.removeprefix("body_"),
)
def test_join(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks(2, body)
