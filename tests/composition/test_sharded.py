"""`parallelize` with axis shard: parity with one process, state dicts, loss contract, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import NonFiniteError, PlanError
from meshwright.plan import Plan, ShardPlan, TrainPlan
from meshwright.testing import MODELS, Ranks, assert_same_training
from support.internals.axes import Axes
from support.internals.comm import mesh_communicators
from support.late import raises_by_now

SHARDABLE = [name for name, sample in MODELS.items() if not sample.depends_on]


def plan_of(
    shard: int, replicate: int = 1, units: tuple[str, ...] | None = None, **train: object
) -> Plan:
    sizes = {"replicate": replicate, "shard": shard}
    shards = ShardPlan() if units is None else ShardPlan(units=units)
    return Plan(axes=Axes.of(sizes), shard=shards, train=TrainPlan(**train))  # pyrefly: ignore


@pytest.mark.few(2)
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
    with raises_by_now(NonFiniteError, match="the gradient of '.*' and .* more on ranks .1."):
        trainable.step(x, torch.zeros(2, 3).double())


def test_a_gradient_that_is_not_finite_stops_all_ranks(ranks: Ranks) -> None:
    ranks(2, body_non_finite)


def train_on(ranks_of_group: tuple[int, ...], plan: Plan) -> None:
    """Train on the ranks of a group that holds not all; the others do nothing meanwhile."""
    world = communicator()
    group = dist.new_group(list(ranks_of_group))
    if world.rank not in ranks_of_group:
        return
    size, mine = len(ranks_of_group), ranks_of_group.index(world.rank)
    one = mlp()
    model = copy.deepcopy(one)
    if mine:
        nn.init.zeros_(model[0].weight)
    trainable = parallelize(model, plan, optimizer=torch.optim.Adam, loss=F.mse_loss, group=group)
    assert (trainable.data_rank, trainable.data_size) == (mine, size)
    plain = torch.optim.Adam(one.parameters())
    for step in range(3):
        x = torch.randn(size * 2, 6, generator=torch.Generator().manual_seed(step)).double()
        y = torch.zeros(size * 2, 3).double()
        trainable.step(x.chunk(size)[mine], y.chunk(size)[mine])
        F.mse_loss(one(x), y).backward()
        plain.step()
        plain.zero_grad()
    for name, value in one.state_dict().items():
        found = trainable.state_dict()["model"][name]
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


def body_smaller_group() -> None:
    train_on((2, 3), plan_of(2))
    train_on((1, 2, 3), plan_of(3))
    group = dist.new_group([0, 3])
    if communicator().rank in (0, 3):
        with pytest.raises(PlanError, match=r"axes multiply to 4 .* but there are 2 ranks"):
            parallelize(mlp(), plan_of(2, 2), optimizer=None, loss=F.mse_loss, group=group)


def test_a_group_of_some_ranks_trains_by_itself(ranks: Ranks) -> None:
    ranks(4, body_smaller_group)


@pytest.mark.slow
def test_a_group_of_some_ranks_trains_in_hybrid(ranks: Ranks) -> None:
    ranks(5, train_on, (1, 2, 3, 4), plan_of(2, 2))


def body_order_of_axes() -> dict[str, tuple[int, ...]]:
    plan = Plan(axes=Axes.of({"shard": 2, "replicate": 2}))
    trainable = parallelize(mlp(), plan, optimizer=None, loss=F.mse_loss)
    weight = next(trainable.module.parameters())
    assert isinstance(weight, DTensor)
    axes = mesh_communicators(weight.device_mesh)
    return {axis.axis: axis.ranks for axis in axes}


def test_the_first_axis_of_a_plan_varies_slowest(ranks: Ranks) -> None:
    found = ranks(4, body_order_of_axes)
    assert found[0] == {"replicate": (0, 1), "shard": (0, 2)}
    assert found[3] == {"replicate": (2, 3), "shard": (1, 3)}
    plan = Plan(axes=Axes.of({"shard": 2, "replicate": 2}))
    assert_same_training(MODELS["tied"], plan, world=4, ranks=ranks)


def body_plans_that_do_not_fit() -> None:
    for sizes, text in (
        ({"shard": 3}, r"axes multiply to 3 \(shard = 3\), but there are 2 ranks"),
        ({"replicate": 2, "shard": 2}, r"multiply to 4 \(replicate = 2 x shard = 2\), but there"),
    ):
        with pytest.raises(PlanError, match=text):
            parallelize(mlp(), Plan(axes=Axes.of(sizes)), optimizer=None, loss=F.mse_loss)
    with pytest.raises(PlanError, match=r"'layer\.\*' in \[shard\] units matches no module"):
        parallelize(mlp(), plan_of(2, units=("layer.*",)), optimizer=None, loss=F.mse_loss)
    idle = Plan(axes=Axes.of({"replicate": 2}), shard=ShardPlan(reshard_after_forward=False))
    with pytest.raises(PlanError, match="'reshard_after_forward' in .* has no effect"):
        parallelize(mlp(), idle, optimizer=None, loss=F.mse_loss)
    scalar = mlp()
    scalar.register_parameter("scale", nn.Parameter(torch.tensor(1.0).double()))
    with pytest.raises(ValueError, match="scalar parameters. Change scale to a 1D tensor"):
        parallelize(scalar, plan_of(2), optimizer=None, loss=F.mse_loss)


def test_plans_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    ranks(2, body_plans_that_do_not_fit)
