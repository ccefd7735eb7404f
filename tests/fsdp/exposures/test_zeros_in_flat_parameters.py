"""Parameters that get no gradient on any rank, in a flat parameter with others that do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm import communicator
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.fsdp import ShardingStrategy
from meshwright.testing import Ranks


class Heads(nn.Module):
    """Two heads, of which ``heads`` says who is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.main = nn.Linear(4, 3)
        self.aux = nn.Linear(4, 5)
        self.heads = ["main"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.cat([getattr(self, head)(x) for head in self.heads], dim=-1)


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def told(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[str]:
    """Train, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.ones(2, 4).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [text for each in caught if "no rank has a gradient" in (text := str(each.message))]


KINDS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}


def body_class(kind: str) -> list[str]:
    world = communicator()
    model = FSDP(heads(), **KINDS[kind])
    found = told(model, torch.optim.AdamW(model.parameters()))
    assert len(found) <= 1
    # Whoever uses it, another rank than that which has its elements too: it has a gradient.
    for user in range(world.size):
        model = FSDP(heads(), **KINDS[kind])
        if world.rank == user:
            model.module.heads = ["main", "aux"]
        assert told(model, torch.optim.AdamW(model.parameters())) == []
    model = FSDP(heads(), use_orig_params=True, **KINDS[kind])
    assert told(model, torch.optim.AdamW(model.parameters())) == []
    return found


@pytest.mark.few(4, slow=8)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD`")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_parameter_names_what_no_rank_has_a_gradient_of(
    ranks: Ranks, size: int, kind: str
) -> None:
    found = [text for texts in ranks(size, body_class, kind) for text in texts]
    assert found
    for name in ("aux.weight", "aux.bias"):
        assert any(name in text for text in found)
    assert not any("main" in text or "body" in text for text in found)


def body_flat_groups() -> None:
    for wrap in (mw.fully_shard, mw.replicate, lambda model: model):
        model: Any = wrap(heads())
        optimizer = torch.optim.AdamW(mw.flat_groups(model))
        (text,) = told(model, optimizer)
        assert "aux.weight, aux.bias, in one flat parameter" in text
        model.heads = ["main", "aux"]
        assert told(model, optimizer) == []


def test_flat_groups_name_what_no_rank_has_a_gradient_of(ranks: Ranks) -> None:
    ranks(2, body_flat_groups)
