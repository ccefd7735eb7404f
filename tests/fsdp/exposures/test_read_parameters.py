"""A loss that reads parameters: as in one process, or refused by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ShardingStrategy
from meshwright.testing import Ranks


class Net(nn.Module):
    """Two layers, the second of which a loss may read, or this forward itself."""

    def __init__(self, *, lists: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.lists = lists

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.tanh(self.first(x)))
        listed = sum(p.square().sum() for p in self.head.parameters()) if self.lists else 0
        return y.square().mean() + listed


def numbers() -> torch.Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match="the loss has read") as caught:
        run()
    return str(caught.value)


def body_read_after_forward() -> None:
    for use_orig_params in (True, False):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            net = Net()
            chosen: dict[str, Any] = {
                "sharding_strategy": strategy,
                "use_orig_params": use_orig_params,
            }
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The `NO_SHARD`")
                net.head = FSDP(net.head, **chosen)  # the root keeps its own until the backward
                model = FSDP(net, **chosen)
            if strategy is ShardingStrategy.FULL_SHARD:  # the other one shows whole ones
                loss = model(numbers()) + net.head.weight.square().sum()
                assert "weight" in refusal(loss.backward)
                model.zero_grad()
            below = model(numbers()) + sum(p.square().sum() for p in net.head.parameters())
            every = model(numbers()) + sum(p.square().sum() for p in model.parameters())
            if strategy is ShardingStrategy.FULL_SHARD:
                for loss in (below, every):
                    assert "fully_shard" in refusal(loss.backward)
                    model.zero_grad()
            model(numbers()).backward()
            assert all(p.grad is not None for p in model.parameters() if p.numel())


def test_a_loss_that_reads_a_part_is_refused(ranks: Ranks) -> None:
    ranks(2, body_read_after_forward)


def body_graph_run_again() -> None:
    def train(model: Any, net: Net) -> list[torch.Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(4):
            x = numbers().requires_grad_()
            is_last = number % 2 == 1  # before it gradients wait for their reduction
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            waits = hasattr(model, "no_sync") and not is_last
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = model(x) + net.head.weight.square().sum()
                torch.autograd.grad(loss, x, retain_graph=True)
                loss.backward()
            if not is_last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    one = Net()
    expected = train(one, one)
    for use_orig_params in (True, False):
        net = Net()
        strategy = ShardingStrategy.SHARD_GRAD_OP
        model = FSDP(net, sharding_strategy=strategy, use_orig_params=use_orig_params)
        torch.testing.assert_close(train(model, net), expected, rtol=1e-12, atol=0)
    for after in (None, False):
        net = Net()
        model = fully_shard(net, reshard_after_forward=after)
        torch.testing.assert_close(train(model, net), expected, rtol=1e-12, atol=0)


def test_a_graph_that_is_run_again_has_its_weights(ranks: Ranks) -> None:
    ranks(2, body_graph_run_again)
