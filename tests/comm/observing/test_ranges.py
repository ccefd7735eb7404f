"""Collectives in the traces of `torch.profiler`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from meshwright.comm import communicator
from meshwright.data_parallel import DistributedDataParallel, fully_shard
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.testing import Ranks


def body(theirs: str) -> None:
    models = [
        DistributedDataParallel(nn.Linear(4, 4)),
        fully_shard(nn.Linear(4, 4)),
        FullyShardedDataParallel(nn.Linear(4, 4)),
    ]
    axis = communicator()
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    pending = axis.all_reduce(torch.ones(4), label="before")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pending.wait()
        for model in models:
            model(torch.ones(2, 4)).sum().backward()
        axis.all_reduce(torch.ones(4), label="inside").wait()
        dist.all_reduce(torch.ones(4))
        after = axis.all_reduce(torch.ones(4), label="after")
    total = after.wait()
    assert total is not None
    assert total.tolist() == [2.0] * 4
    names = {event.key: event.count for event in found.key_averages()}
    for name in (
        "all_reduce reduce bucket 0 on axis replicate",
        "all_gather unshard FSDPLinear on axis shard",
        "reduce_scatter reduce FSDPLinear on axis shard",
        f"all_reduce inside on axis {axis.axis}",
    ):
        assert names[f"meshwright::{name}"] == 1
        assert names[f"meshwright::{name} (wait)"] >= 1
    assert names[f"meshwright::all_reduce after on axis {axis.axis}"] == 1
    assert not any("before" in name for name in names)
    for kind in (DistributedDataParallel, FullyShardedDataParallel):
        assert names[f"{kind.__name__}.forward"] == 1
    # With those of the backend inside, for calls of users too.
    assert names[f"{theirs}:all_reduce"] >= 3  # one may end later


@pytest.mark.parametrize("backend", ["meshwright", "gloo"])
def test_collectives_are_ranges(ranks: Ranks, backend: str) -> None:
    ranks(2, body, backend, backend=backend)
