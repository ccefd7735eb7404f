"""Layouts of two axes in which a rule of another axis met experts; found by the fuzzer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import meshwright as mw
from meshwright.composition import parallelize
from meshwright.expert_parallel import ExpertParallel, experts_of
from meshwright.mesh import init_device_mesh
from meshwright.plan import PipelinePlan, Plan, ShardPlan
from meshwright.testing import Ranks
from support.expert_parallel.samples import Block, D, Fused
from support.internals.axes import Axes

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, D, dtype=torch.float64, generator=generator)


def body_of_own_loop(count: int) -> None:
    """The mesh of the docs page, with several ranks in both dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    torch.manual_seed(0)
    one = Block(Fused(count), 2).double()
    many = copy.deepcopy(one)
    mw.parallelize_module(many, mesh["ep"], {"experts": ExpertParallel()})
    mw.fully_shard(many, mesh=mesh["shard", "ep"]._flatten("dense"))
    optimizers = [sgd(each.parameters()) for each in (one, many)]
    for step in range(3):
        x = batch(step)
        one(x).square().mean().backward()
        many(x.chunk(4)[torch.distributed.get_rank()]).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for (name, whole), mine in zip(one.named_parameters(), many.parameters(), strict=True):
        found = mine.full_tensor()
        torch.testing.assert_close(found, whole, **CLOSE, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [4, 3])
def test_shards_over_more_ranks_than_experts_are_not_compared_as_copies(
    ranks: Ranks, count: int
) -> None:
    ranks(4, body_of_own_loop, count)


def body_of_compiled_blocks() -> None:
    """In the order of torchtitan: styles, then compiled blocks, then units."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "ep"))
    torch.manual_seed(0)
    one: Any = nn.Sequential(nn.Linear(D, D), Block(Fused(4), 2)).double()
    many = copy.deepcopy(one)
    mw.parallelize_module(many, mesh["ep"], {"1.experts": ExpertParallel()})
    many[1].compile(backend="aot_eager")
    dense = mesh["shard", "ep"]._flatten("dense")
    mw.fully_shard(many[1], mesh=dense)
    mw.fully_shard(many, mesh=dense)
    one(batch(0)).square().mean().backward()
    many(batch(0).chunk(2)[torch.distributed.get_rank()]).square().mean().backward()
    for (name, whole), mine in zip(one.named_parameters(), many.parameters(), strict=True):
        found = mine.grad.full_tensor()
        torch.testing.assert_close(found, whole.grad, **CLOSE, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.slow
@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
def test_blocks_that_are_compiled_after_styles(ranks: Ranks) -> None:
    ranks(2, body_of_compiled_blocks)


class Listed(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, number)
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(number)])
        experts_of(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.router(x).softmax(-1).topk(1)
        return x + self.experts(x, indices, weights)


def listed(number: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Listed(number), nn.Linear(D, D), Listed(number), nn.Linear(D, D)).double()


def laid(number: int, plan: Plan) -> Any:
    optimizer, example = torch.optim.Adam, (batch(0),)
    model, loss = listed(number), functional.mse_loss
    return parallelize(model, plan, optimizer=optimizer, loss=loss, example=example)


def body_of_pipeline() -> None:
    one = listed(3)
    names = {name for name, _ in one.named_parameters()}
    plan = Plan(
        axes=Axes.of({"pipeline": 2}), pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
    )
    many, x = laid(3, plan), batch(1)
    functional.mse_loss(one(x), batch(2)).backward()
    many.forward_backward(x, batch(2))
    gradients = many.gradients()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **CLOSE)
    many.optimizer_step()
    state = copy.deepcopy(many.state_dict())
    assert {*state["optimizer"]["state"]} == names
    again = laid(3, plan)
    again.load_state_dict(copy.deepcopy(state))
    for each in (many, again):
        each.step(batch(3), batch(4))
    found = again.weights()
    for name, value in many.weights().items():
        assert torch.equal(found[name], value), name


def test_a_pipeline_saves_what_optimizers_keep_of_lists_of_experts(ranks: Ranks) -> None:
    ranks(2, body_of_pipeline)


def body_of_shards() -> None:
    """One expert: half of the ranks have none, and units with nothing of theirs."""
    plan = Plan(
        axes=Axes.of({"shard": 2, "expert": 2}),
        shard=ShardPlan(units=("0",), reshard_after_forward=False),
    )
    many, one = laid(1, plan), listed(1)
    x, y = batch(1), batch(2)
    functional.mse_loss(one(x), y).backward()
    rank = many.data_rank
    many.forward_backward(x.chunk(4)[rank], y.chunk(4)[rank])
    gradients = many.gradients()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **CLOSE)


def test_shards_of_no_expert(ranks: Ranks) -> None:
    ranks(4, body_of_shards)
