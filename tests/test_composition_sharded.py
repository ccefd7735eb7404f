"""`parallelize` with axis shard: parity with one process, state dicts, loss contract, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.axes import Axes
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import NonFiniteError
from meshwright.plan import Plan, ShardPlan, TrainPlan
from meshwright.testing import MODELS, Ranks, assert_same_training

SHARDABLE = [name for name, sample in MODELS.items() if not sample.depends_on]


def plan_of(
    shard: int, replicate: int = 1, units: tuple[str, ...] | None = None, **train: object
) -> Plan:
    sizes = {"replicate": replicate, "shard": shard}
    shards = ShardPlan() if units is None else ShardPlan(units=units)
    return Plan(axes=Axes.of(sizes), shard=shards, train=TrainPlan(**train))  # pyrefly: ignore


@pytest.mark.parametrize("name", SHARDABLE)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    assert_same_training(MODELS[name], plan_of(2), world=2, ranks=ranks)


def test_trains_as_one_process_in_hybrid(ranks: Ranks) -> None:
    plan = plan_of(2, 2, accumulate=2, clip_norm=0.05)
    assert_same_training(MODELS["transformer"], plan, world=4, ranks=ranks)


def test_units_by_pattern(ranks: Ranks) -> None:
    plan = plan_of(2, units=("layers.*", "embedding"), clip_norm=0.05)
    assert_same_training(MODELS["transformer"], plan, world=2, ranks=ranks)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.mse_loss(output, target, reduction="sum"), torch.tensor(float(target.numel()))


def body_state_and_sums() -> None:
    world = communicator()
    one = mlp()
    adam = torch.optim.Adam
    trainable = parallelize(copy.deepcopy(one), plan_of(2), optimizer=adam, loss=summed)
    assert trainable.data_size == 2
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).double()
    y = torch.zeros(6, 3).double()
    # Shares of unequal size: a sum and a count give the mean over all of them.
    mine = slice(0, 4) if world.rank == 0 else slice(4, 6)
    plain = adam(one.parameters())
    for _ in range(3):
        trainable.step(x[mine], y[mine])
        F.mse_loss(one(x), y).backward()
        plain.step()
        plain.zero_grad()
    state = trainable.state_dict()
    for name, value in one.state_dict().items():
        assert not isinstance(state["model"][name], DTensor)
        torch.testing.assert_close(state["model"][name], value, rtol=1e-10, atol=1e-12)
    other = parallelize(mlp(), plan_of(2), optimizer=adam, loss=summed)
    other.load_state_dict(state)
    for each in (trainable, other):
        each.step(x[mine], y[mine])
    again = other.state_dict()
    for name, value in trainable.state_dict()["model"].items():
        assert torch.equal(again["model"][name], value)
    assert "unit" in str(trainable.describe())
    assert torch.isfinite(trainable.eval(x[mine], y[mine]).loss)


def test_state_dicts_are_whole_and_sums_are_of_all_ranks(ranks: Ranks) -> None:
    ranks(2, body_state_and_sums)


def body_non_finite() -> None:
    world = communicator()
    trainable = parallelize(mlp(), plan_of(2), optimizer=torch.optim.Adam, loss=F.mse_loss)
    x = torch.ones(2, 6).double()
    if world.rank == 1:
        x[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="on rank 1 the loss"):
        trainable.step(x, torch.zeros(2, 3).double())


def test_a_gradient_that_is_not_finite_stops_all_ranks(ranks: Ranks) -> None:
    ranks(2, body_non_finite)
