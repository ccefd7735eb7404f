"""Training goes on after a backward pass that raised, whichever way its gradients are zeroed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.fsdp.wrap import ModuleWrapPolicy
from meshwright.testing import Ranks


class Breaks(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


class Layer(nn.Module):
    """A layer with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def sharded(model: nn.Module) -> nn.Module:
    for layer in list(model.children())[:3]:
        fully_shard(layer)
    return fully_shard(model)


def wrapped(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


SMALL = {"bucket_cap_mb": 0.0001}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": lambda model: replicate(model, **SMALL),
    "views": lambda model: replicate(model, gradient_as_bucket_view=True, **SMALL),
    "static": lambda model: replicate(model, static_graph=True, **SMALL),
    "fully_shard": sharded,
    "class": wrapped,
}
ON_HOSTS = pytest.mark.devices("host", reason="what is zeroed while it is summed is given up")


def step(model: nn.Module, rows: slice, seed: int) -> torch.Tensor:
    """Run a forward and a backward pass on some rows of a batch."""
    torch.manual_seed(seed)
    x, target = torch.randn(8, 6).double()[rows], torch.randn(8, 3).double()[rows]
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    return loss.detach()


def body(way: str, set_to_none: bool) -> None:
    world = communicator()
    torch.manual_seed(1)
    one = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(6, 3)).double()
    many = WAYS[way](copy.deepcopy(one))
    layers = list(getattr(many, "module", many).children())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
    share = 8 // world.size
    mine = slice(world.rank * share, (world.rank + 1) * share)
    for seed in range(4):
        if seed in (1, 2):
            hook = layers[seed].register_forward_hook(lambda *given: Breaks.apply(given[-1]))
            with pytest.raises(ValueError, match="planted"):
                step(many, mine, seed)
            hook.remove()
            optimizers[1].zero_grad(set_to_none=set_to_none)
            continue
        expected, found = step(one, slice(0, 8), seed), step(many, mine, seed)
        world.all_reduce(found).wait()
        torch.testing.assert_close(found / world.size, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    x = torch.randn(8, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(many(x), one(x))


@pytest.mark.few(2)
@pytest.mark.parametrize("set_to_none", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[ON_HOSTS] if way == "views" else []) for way in WAYS]
)
def test_trains_as_one_process_afterwards(ranks: Ranks, way: str, set_to_none: bool) -> None:
    ranks(2, body, way, set_to_none)
