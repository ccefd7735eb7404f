"""`clip_grad_norm_` on models under every strategy gives the norm and gradients of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.comm import communicator
from meshwright.data_parallel import fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.gradients import clip_grad_norm_
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks


class Tied(nn.Module):
    """A tied pair, a layer of odd sizes and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.hidden = nn.Linear(5, 5)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(index)).tanh())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def batch() -> torch.Tensor:
    return torch.arange(8) % 7


def loss_of(module: nn.Module, part: torch.Tensor) -> torch.Tensor:
    return 10 * module(part).square().mean()


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module.hidden)
    return fully_shard(module)


def hybrid(module: nn.Module) -> nn.Module:
    half = communicator().size // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    fully_shard(module.hidden, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def facade(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        module.hidden = FullyShardedDataParallel(module.hidden, **options)
        return FullyShardedDataParallel(module, **options)

    return wrap


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": replicate,
    "fully_shard": sharded,
    "flat": facade(),
    "original": facade(use_orig_params=True),
    "grad_op": facade(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
}


def body(wrap: Callable[[nn.Module], nn.Module], norm_type: float) -> None:
    world = communicator()
    one = model()
    module = wrap(copy.deepcopy(one))
    loss_of(one, batch()).backward()
    share = len(batch()) // world.size
    loss_of(module, batch()[world.rank * share :][:share]).backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01, norm_type)
    found = clip_grad_norm_(module, 0.01, norm_type)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    again = clip_grad_norm_(module.parameters(), math.inf, norm_type)
    assert again.item() == pytest.approx(0.01, rel=1e-3)
    if isinstance(next(module.parameters()), DTensor):
        for name, parameter in module.named_parameters():
            whole = one.get_parameter(name).grad
            if whole is not None:
                assert isinstance(parameter.grad, DTensor)
                torch.testing.assert_close(parameter.grad.full_tensor(), whole)


@pytest.mark.few(7)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("name", WRAPS)
def test_the_norm_is_that_of_one_process(
    ranks: Ranks, name: str, norm_type: float, size: int
) -> None:
    ranks(size, body, WRAPS[name], norm_type)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_a_hybrid_is_that_of_one_process(ranks: Ranks, norm_type: float) -> None:
    ranks(4, body, hybrid, norm_type)
