"""Parameters that a forward pass writes in place, of what every rank holds whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.composition import parallelize
from meshwright.fsdp import FullyShardedDataParallel, ShardingStrategy
from meshwright.plan import Plan
from meshwright.testing import Ranks


def whole(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy")
        return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def planned(model: nn.Module) -> nn.Module:
    plan = Plan.from_toml("[axes]\nreplicate = 2")
    loss = nn.functional.mse_loss
    return parallelize(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=loss).model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": mw.replicate,
    "DistributedDataParallel": mw.DistributedDataParallel,
    "NO_SHARD": whole,
    "plan": planned,
}


def body_max_norm() -> dict[str, str]:
    found = {}
    for name, wrap in WRAPS.items():
        torch.manual_seed(0)
        layers = nn.Embedding(9, 4, max_norm=0.5), nn.EmbeddingBag(9, 4, max_norm=1.0)
        for layer in layers:
            with pytest.raises(ValueError, match="so that replicas would part") as caught:
                wrap(nn.Sequential(layer, nn.Linear(4, 1)))(torch.ones(2, 1, dtype=torch.int64))
        found[name] = str(caught.value)
    return found


def test_rows_scaled_by_what_a_batch_looks_up_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, body_max_norm):
        for text in found.values():
            assert text.startswith("parameter '0.weight' is the weight of EmbeddingBag with max_")


class Clamped(nn.Linear):
    """A layer that writes its weight in each forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def body_written() -> dict[str, list[str]]:
    found = {}
    for name in ("replicate", "DistributedDataParallel"):
        torch.manual_seed(0)
        model = WRAPS[name](nn.Sequential(Clamped(4, 4), nn.Linear(4, 1)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        found[name] = [str(each.message) for each in caught]
    return found


def test_a_parameter_that_forward_writes_is_named_once(ranks: Ranks) -> None:
    first, second = ranks(2, body_written)
    for (text,) in first.values():
        assert text.startswith("the forward pass has written '0.weight' in place. Replicas stay")
    assert second == {"replicate": [], "DistributedDataParallel": []}
