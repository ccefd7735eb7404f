"""Parameters that a forward pass writes in place, of what every rank holds whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import keep_batch_norm_local
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


class Codes(nn.Module):
    """A layer with buffers that its forward writes: a codebook, a counter, a cache."""

    def __init__(self, is_reduced: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.is_reduced = is_reduced
        self.codes: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean(0)
            if self.is_reduced:
                torch.distributed.all_reduce(mean)
            self.codes.lerp_(mean, 0.1)
            self.count += 1
            self.last = x.detach()
        return self.norm(self.layer(x)) + self.codes


def own_buffers(model: nn.Module) -> nn.Module:
    return mw.replicate(model, broadcast_buffers=False)


BUFFERED = {"own buffers": own_buffers, "fully_shard": mw.fully_shard, **WRAPS}
del BUFFERED["plan"], BUFFERED["NO_SHARD"]
BUFFERED["class"] = FullyShardedDataParallel


def body_buffers(name: str, *, is_reduced: bool) -> list[str]:
    model = Codes(is_reduced)
    keep_batch_norm_local(model)
    model = BUFFERED[name](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            x = torch.arange(6.0).view(2, 3) + communicator().rank
            if step == 1:  # an evaluation makes the buffers of replicas equal
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
            model(x).sum().backward()
    return [str(each.message) for each in caught if "written buffer" in str(each.message)]


@pytest.mark.parametrize("name", BUFFERED)
def test_buffers_of_each_ranks_own_batch_are_told_of_once(ranks: Ranks, name: str) -> None:
    first, *others = ranks(2, body_buffers, name, is_reduced=False)
    (text,) = first
    assert "codes' by the batch of each of 2 ranks alone" in text
    assert others == [[]]


@pytest.mark.parametrize("name", BUFFERED)
def test_buffers_that_all_batches_write_alike_are_right(ranks: Ranks, name: str) -> None:
    assert ranks(2, body_buffers, name, is_reduced=True) == [[], []]
