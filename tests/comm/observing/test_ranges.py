"""Collectives in the traces of `torch.profiler`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from meshwright.comm import communicator
from meshwright.data_parallel import DistributedDataParallel, fully_shard, replicate
from meshwright.fsdp import FullyShardedDataParallel, ModuleWrapPolicy
from meshwright.mesh import init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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
    # With those of the backend inside, in c10d's operator, for calls of users too.
    assert names[f"{theirs}:all_reduce"] >= 3  # one may end later
    assert names["c10d::allreduce_"] >= 3


@pytest.mark.parametrize("backend", ["meshwright", "gloo"])
def test_collectives_are_ranges(ranks: Ranks, backend: str) -> None:
    ranks(2, body, backend, backend=backend)


def profiled(step: Callable[[], object]) -> set[str]:
    """The names of ranges of the second call of ``step``."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return {event.key for event in found.key_averages()}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def trained(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.ones(2, 4)).sum().backward()


def body_units() -> None:
    moments = "pre_forward", "post_forward", "pre_backward", "post_backward"
    sharded = layers()
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part)
    found = profiled(trained(sharded))
    for name in ("0", "2"):
        assert {f"FSDP::{moment} ({name})" for moment in moments} <= found, name
    # The root has no parameters that could be reduced.
    assert {f"FSDP::{moment} (FSDPSequential)" for moment in moments[:3]} <= found
    facade = FullyShardedDataParallel(layers(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    found = profiled(trained(facade))
    for moment in moments:
        assert sum(name.startswith(f"FSDP::{moment} (") for name in found) >= 2
    # A replica's unit is its bucket; a layer over tensor ranks is known by its name.
    found = profiled(trained(replicate(layers())))
    assert "meshwright::all_reduce reduce bucket 0 on axis replicate" in found
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (communicator().size,), mesh_dim_names=("tensor",))
    found = profiled(trained(parallelize_module(layers(), mesh, plan)))
    sums = [name for name in found if name.startswith("meshwright::all_reduce ")]
    assert any(" 2" in name and name.endswith("on axis tensor") for name in sums), sums
    assert not any(name.startswith("FSDP") for name in found)


@pytest.mark.backends("shm", "gloo")
def test_units_are_ranges_under_the_names_of_torchs(ranks: Ranks) -> None:
    ranks(2, body_units)


def body_messages() -> None:
    world = communicator()

    def step() -> None:
        if world.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)

    names = profiled(step)
    assert ("c10d::send" if world.rank == 0 else "c10d::recv_") in names


@pytest.mark.backends("shm", "gloo")
def test_messages_are_ranges(ranks: Ranks) -> None:
    ranks(2, body_messages)
