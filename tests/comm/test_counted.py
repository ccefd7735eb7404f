"""What torch's CommDebugMode counts on Gloo: what torch's wrappers issue, from the first step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as of_torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright import tensor_parallel
from meshwright.comm import Recorder, communicator, observe
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks

Wrap = Callable[[nn.Sequential], nn.Module]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


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
    """By pass of three steps, how often CommDebugMode has seen each kind."""
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
            kinds: Counter[str] = Counter()
            for op, count in mode.get_comm_counts().items():
                name = str(op).replace("allreduce", "all_reduce").replace("allgather", "all_gather")
                kinds[next(kind for kind in KINDS if kind in name)] += count
            found.append(dict(kinds))
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


@pytest.mark.backends("gloo")
def test_a_dispatch_mode_counts_what_torch_issues(ranks: Ranks) -> None:
    for found in ranks(2, body):
        for name, (ours, theirs) in found.items():
            if name == "DistributedDataParallel":
                assert theirs[2] == {"broadcast": 2}  # torch's ranks agree on new buckets, once
                theirs[2] = {}
            assert ours == theirs, name


@pytest.mark.backends("gloo")
def test_a_dispatch_mode_does_not_see_control_data(ranks: Ranks) -> None:
    for labels, counts in ranks(2, body_control):
        assert labels == ["names: sizes", "names", "numbers"]
        assert not any(counts.values())
