"""Gradients that a function of the graph leaves undefined: None, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.testing import Ranks


class Gate(torch.autograd.Function):
    """The sum of its inputs, of which the second gets a gradient only where it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
        ctx.trains = trains
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.sum(0) if ctx.trains else None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, x: torch.Tensor, trains: bool) -> torch.Tensor:
        return Gate.apply(self.first(x), self.gate, trains)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "static": partial(DistributedDataParallel, static_graph=True),
    "replicate": replicate,
    "fully_shard": fully_shard,
    "original": partial(FSDP, use_orig_params=True),
}


def whole(model: nn.Module, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def train(model: nn.Module, trains: list[bool]) -> list[torch.Tensor]:
    """The weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for number, is_on in enumerate(trains):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number)).double()
        optimizer.zero_grad()
        model(x, is_on).square().mean().backward()
        optimizer.step()
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


def body_nowhere(name: str) -> None:
    """On no rank: optimizers leave the parameter alone, decay included."""
    ours, one = train(WRAPS[name](Net()), [False, False]), train(Net(), [False, False])
    for mine, theirs in zip(ours, one, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def body_on_one_rank(name: str) -> None:
    """On one of two ranks: the mean counts it as zero, in whichever step it comes."""
    rank = communicator().rank
    model = WRAPS[name](Net())
    x = torch.ones(2, 4).double()
    for trains in ((True, True), (rank == 0, rank == 0)):
        model.zero_grad()
        model(x, trains[0]).square().mean().backward()
        parameters = dict(model.named_parameters())
        gate = next(p for n, p in parameters.items() if n.endswith("gate"))
        both = whole(model, gate.grad)
    alone = Net()
    alone(x, True).square().mean().backward()
    expected = alone.gate.grad
    assert expected is not None
    if name != "original":
        assert both is not None
        torch.testing.assert_close(both, expected / 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WRAPS)
def test_undefined_gradients(ranks: Ranks, name: str) -> None:
    ranks(2, body_nowhere, name)
    if name != "static":
        ranks(2, body_on_one_rank, name)


def body_taken(is_before: bool) -> None:
    """A hook that takes a gradient, registered before or after wrapping, is still refused."""
    inner = Net()

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    if is_before:
        inner.gate.register_post_accumulate_grad_hook(take)
    model = DistributedDataParallel(inner)
    if not is_before:
        inner.gate.register_post_accumulate_grad_hook(take)
    with pytest.raises(RuntimeError, match="'gate' got a gradient in this backward pass"):
        model(torch.ones(2, 4).double(), True).square().mean().backward()


@pytest.mark.parametrize("is_before", [True, False])
def test_a_gradient_that_is_taken_is_refused(ranks: Ranks, is_before: bool) -> None:
    ranks(2, body_taken, is_before)
