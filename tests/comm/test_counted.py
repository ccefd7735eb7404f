"""What torch's CommDebugMode counts: what torch's wrappers issue, from the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as of_torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw
from meshwright import tensor_parallel
from meshwright.comm import Recorder, communicator, observe
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

Wrap = Callable[[nn.Sequential], nn.Module]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def sharded(fully_shard: Any) -> Wrap:
    def wrap(model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh("cpu", (communicator().size,))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
        return model

    return wrap


def by_sequence(of: Any) -> Wrap:
    def wrap(model: nn.Sequential) -> nn.Module:
        cols = of.ColwiseParallel(input_layouts=Shard(0))
        rows = of.RowwiseParallel(output_layouts=Shard(0))
        mesh = init_device_mesh("cpu", (communicator().size,))
        return of.parallelize_module(model, mesh, {"0": cols, "2": rows})

    return wrap


WRAPS: dict[str, tuple[Wrap, Wrap]] = {
    "fully_shard": (sharded(mw.fully_shard), sharded(fsdp.fully_shard)),
    "DistributedDataParallel": (mw.DistributedDataParallel, DistributedDataParallel),
    "sequence": (by_sequence(tensor_parallel), by_sequence(of_torch)),
}


def counted(wrap: Wrap) -> list[dict[str, int]]:
    """By pass of three steps, how often CommDebugMode has seen each operation."""
    model, found = wrap(net()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, loss = torch.randn(8, 64, requires_grad=True), torch.zeros(1)
        for backward in (False, True):
            with warnings.catch_warnings(), CommDebugMode() as mode:
                warnings.simplefilter("ignore")  # torch's, of views that wrapped modules return
                if backward:
                    loss.backward()
                    optimizer.step()
                else:
                    loss = model(x).sum()
            found.append({str(op): count for op, count in mode.get_comm_counts().items()})
        optimizer.zero_grad()
    return found


def body() -> dict[str, tuple[list[dict[str, int]], list[dict[str, int]]]]:
    return {name: (counted(ours), counted(theirs)) for name, (ours, theirs) in WRAPS.items()}


def body_control() -> tuple[list[str], dict[Any, int]]:
    """Whoever asks the door sees control data, too."""
    recorder = Recorder()
    with observe(recorder), CommDebugMode() as mode:
        communicator().gather_bytes(b"a", label="names")
        communicator().gather_numbers([1.0], label="numbers")
    return [each.label for each in recorder.collectives], mode.get_comm_counts()


def body_on_one_rank() -> list[float]:
    """Gathers and sums that Gloo makes of other operations, counted on rank 0 alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    for module in (model[0], model[2], model):
        mw.fully_shard(module)
    found = []
    for mode in (FlopCounterMode(display=False), CommDebugMode(), nullcontext()):
        with mode if communicator().rank == 0 else nullcontext():
            model(torch.ones(4, 300, requires_grad=True)).sum().backward()
        found.append(float(sum(p.grad.full_tensor().sum() for p in model.parameters())))
        model.zero_grad()
    return found


def body_alone() -> dict[Any, int]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))
    model = mw.fully_shard(net(), mesh=mesh["shard"])
    x = torch.randn(8, 64, requires_grad=True)
    with CommDebugMode() as mode:
        model(x).sum().backward()
    return mode.get_comm_counts()


@pytest.mark.backends("gloo")
def test_a_dispatch_mode_counts_what_torch_issues(ranks: Ranks) -> None:
    for found in ranks(2, body):
        for name, (ours, theirs) in found.items():
            if name == "DistributedDataParallel":
                # torch's ranks agree on new buckets, once
                assert theirs[2] == {"c10d.broadcast_": 2}
                theirs[2] = {}
            assert ours == theirs, name


@pytest.mark.backends("shm")
def test_operations_of_shared_memory_are_counted_as_those_of_c10d(ranks: Ranks) -> None:
    gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
    for found in ranks(2, counted, WRAPS["fully_shard"][0]):
        assert found == [{gather: 2}, {gather: 2, scatter: 2}] * 3


@pytest.mark.backends("gloo")
def test_a_mode_on_one_rank_changes_nothing_that_is_sent(ranks: Ranks) -> None:
    first, second = ranks(2, body_on_one_rank)
    assert first == second
    assert len(set(first)) == 1


def test_nothing_is_sent_over_one_rank(ranks: Ranks) -> None:
    assert not any(sum(counts.values()) for counts in ranks(2, body_alone))


def test_a_dispatch_mode_does_not_see_control_data(ranks: Ranks) -> None:
    for labels, counts in ranks(2, body_control):
        assert labels == ["names: sizes", "names", "numbers"]
        assert not any(counts.values())
