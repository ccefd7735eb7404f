"""Parameters and gradients as programs see them in a pass: those of one process, as far as can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.data_parallel import fully_shard
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from meshwright.testing import Ranks

KINDS = [
    (strategy, use_orig_params)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for use_orig_params in (True, False)
]


class Net(nn.Module):
    """Lists its parameters in its forward, and has a penalty of them there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 3, dtype=torch.float64)
        self.seen: list[object] = []

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        own = [name.rpartition("wrapped_module.")[2] for name, _ in self.named_parameters()]
        shapes = [tuple(p.shape) for p in self.parameters()]
        self.seen = [own, shapes, next(self.parameters()).dtype, len([*self.head.parameters()])]
        penalty = sum(p.square().sum() for p in self.head.parameters())
        penalty = penalty + sum(p.square().sum() for p in self.parameters())
        y = torch.tanh(self.first(x.to(self.gain.dtype)))
        if given is not None:
            y = torch.func.functional_call(self.head, {"weight": given}, y)
        else:
            y = self.head(y)
        return (y * self.gain).square().mean() + 0.01 * penalty


def numbers() -> torch.Tensor:
    return torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def wrapped(net: nn.Module, strategy: str, use_orig_params: bool, **more: object) -> FSDP:  # noqa: FBT001
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD`")
        return FSDP(
            net,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            **more,  # pyrefly: ignore
        )


def whole(model: FSDP) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = run()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def body_parameters_in_a_forward() -> None:
    one = Net()
    expected = train(one, lambda: one(numbers()))
    for strategy, use_orig_params in KINDS:
        for policy in (None, ModuleWrapPolicy({nn.Linear})):
            net = Net()
            model = wrapped(net, strategy, use_orig_params, auto_wrap_policy=policy)
            if policy is not None:  # children list what they have when they run
                continue
            found = train(model, lambda: model(numbers()))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(whole(model), [*one.parameters()], rtol=1e-9, atol=1e-12)
            assert net.seen == one.seen
            listed = [name.rpartition(".")[2] for name, _ in model.named_parameters()]
            assert ("_flat_param" in listed) is not use_orig_params, "what optimizers hold is back"


def test_parameters_listed_in_a_forward_are_whole(ranks: Ranks) -> None:
    ranks(2, body_parameters_in_a_forward)
