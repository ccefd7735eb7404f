"""Upstream's cases of order: ranks that run the units of a model in different orders."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ShardingStrategy
from meshwright.testing import Ranks

pytestmark = pytest.mark.backends("shm", "gloo")

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP"]


class Model(nn.Module):
    """Two paths, of 36 parameters each: their collectives could be mixed up in silence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer0 = nn.Linear(5, 6)
        self.layer1 = nn.Linear(6, 6, bias=False)
        self.layer2 = nn.Sequential(
            nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 6, bias=False)
        )
        self.relu = nn.ReLU()
        self.use_alt_path = False
        for parameter in self.layer2.parameters():
            parameter.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.relu(self.layer0(x))
        return self.relu(self.layer2(z) if self.use_alt_path else self.layer1(z))

    def flip_path(self) -> None:
        frozen, thawed = self.layer1, self.layer2
        if self.use_alt_path:
            frozen, thawed = thawed, frozen
        for parameter in frozen.parameters():
            parameter.requires_grad = False
        for parameter in thawed.parameters():
            parameter.requires_grad = True
        self.use_alt_path = not self.use_alt_path


def wrapped(strategy: str) -> FSDP:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = Model()
    chosen = ShardingStrategy[strategy]
    model.layer1 = FSDP(model.layer1, sharding_strategy=chosen)
    model.layer2 = FSDP(model.layer2, sharding_strategy=chosen)
    return FSDP(model, sharding_strategy=chosen).to(torch.device("cpu"))


def run(model: FSDP) -> None:
    model(torch.randn(8, 5)).sum().backward()


def body_first(strategy: str) -> None:
    model = wrapped(strategy)
    if communicator().rank != 0:
        model.flip_path()
    with pytest.raises(RuntimeError, match=r"^(Forward order differs across ranks)") as caught:
        model(torch.randn(8, 5))
    assert "layer1.weight" in str(caught.value)
    assert "layer2.0.weight" in str(caught.value)
    communicator().barrier()


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_invalid_first_iter_order(ranks: Ranks, strategy: str, size: int) -> None:
    ranks(size, body_first, strategy)


def body_later(strategy: str, iterations: int) -> None:
    rank = communicator().rank
    model = wrapped(strategy)
    for _ in range(iterations):
        run(model)
    if rank != 0:
        model.flip_path()
        text = (
            rf"^(Forward order differs from that of the first iteration on rank {rank}. "
            r"Collectives are unchecked and may give incorrect results or hang)"
        )
        with pytest.warns(UserWarning, match=text):
            output = model(torch.randn(8, 5))
    else:
        output = model(torch.randn(8, 5))
    output.sum().backward()
    run(model)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("iterations", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, 4])
def test_invalid_later_iter_order(ranks: Ranks, strategy: str, iterations: int, size: int) -> None:
    ranks(size, body_later, strategy, iterations)


def body_train_eval(strategy: str) -> None:
    model = wrapped(strategy)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            model.train()
            for _ in range(3):
                run(model)
            model.eval()
            for _ in range(3):
                model(torch.randn(8, 5)).sum()
    assert not [w for w in caught if re.match("Forward order differs", str(w.message))]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_train_eval(ranks: Ranks, strategy: str) -> None:
    ranks(2, body_train_eval, strategy)
