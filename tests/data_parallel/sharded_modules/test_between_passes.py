"""Between passes `fully_shard` shows the parameters of the optimizer, with their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(communicator().size)[communicator().rank]


def sharded(one: nn.Module, *, nested: bool, after: bool | None) -> Any:
    model: Any = copy.deepcopy(one)
    if nested:
        fully_shard(model[0], reshard_after_forward=after)
        fully_shard(model[2], reshard_after_forward=after)
    return fully_shard(model, reshard_after_forward=after)


def retained(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def retained_once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward(retain_graph=True)


def logged(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model(x)


def evaluated(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.eval()
    model(x).square().mean()
    model.train()


def penalised(model: nn.Module, x: torch.Tensor) -> None:
    """The term is taken while gradients of the first pass are there."""
    model(x).square().mean().backward()
    loss = model(x).square().mean()
    for p in model.parameters():
        loss = loss + whole(p.square().sum())
    loss.backward()


def body(nested: bool, after: bool | None) -> None:
    x = batch()
    for passes in (retained_once, retained, logged, evaluated, penalised):
        one = net()
        model = sharded(one, nested=nested, after=after)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, one)]
        mean = copy.deepcopy(one)
        for _ in range(3):
            norms = []
            for each, given, optimizer in zip((model, one), (mine(x), x), optimizers, strict=True):
                passes(each, given)
                held = optimizer.param_groups[0]["params"]
                assert [*map(id, each.parameters())] == [*map(id, held)], passes
                norms.append(whole(clip_grad_norm_(each.parameters(), 0.01)))
                for p in each.parameters():
                    p.grad = -p.grad
                optimizer.step()
                if passes is not retained_once:
                    optimizer.zero_grad()
            assert norms[0] > 0
            torch.testing.assert_close(*norms)
            for p, q, r in zip(
                model.parameters(), one.parameters(), mean.parameters(), strict=True
            ):
                torch.testing.assert_close(whole(p.detach()), q.detach())
                r.data.lerp_(whole(p.detach()), 0.5)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("after", [None, False, True])
def test_whoever_takes_parameters_after_a_backward_gets_those_with_gradients(
    ranks: Ranks, nested: bool, after: bool | None
) -> None:
    ranks(2, body, nested, after)
