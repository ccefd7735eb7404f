"""A default device of the user's is for the user's tensors: the library's own stay on the host.

The ranks' default device is ``meta``, whose tensors nobody can read, and their models lie on the
host: a tensor that the library makes without a device has no numbers, or does not fit the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright import checkpoint
from meshwright.comm import communicator
from meshwright.data import DataLoader
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.plan import PipelinePlan, Plan, TensorPlan
from meshwright.tensor_parallel import ColwiseParallel, RowwiseParallel, verify_replicated
from meshwright.testing import Ranks, Sample, assert_same_training
from support.internals.axes import Axes

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = torch.randn(16, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = [(row, 2 * row[:5].sin()) for row in DATA]


def made() -> nn.Sequential:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)]
        return nn.Sequential(*layers).double()


def on_meta(run: Callable[..., Any], *args: Any) -> Any:
    with torch.device("meta"):
        return run(*args)


# --------------------------------------------------------------------------- plans


def plan(axes: dict[str, int], **more: Any) -> Plan:
    return Plan(axes=Axes.of(axes), **more)


def staged(schedule: Literal["1f1b", "zb1p"]) -> Plan:
    return plan({"pipeline": 2}, pipeline=PipelinePlan(schedule=schedule, microbatches=2))


PLANS = {
    "replicate": plan({"replicate": 2}),
    "shard": plan({"shard": 2}),
    "tensor": plan({"tensor": 2}, tensor=TensorPlan(rules={"0": "colwise", "2": "rowwise"})),
    "1f1b": staged("1f1b"),
    "zb1p": staged("zb1p"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_process(ranks: Ranks, name: str) -> None:
    def started(n: int, run: Callable[..., Any], *args: Any) -> Any:
        return ranks(n, on_meta, run, *args)

    sample = Sample(name="layers", build=made)
    assert_same_training(sample, PLANS[name], world=2, steps=2, ranks=started)


# --------------------------------------------------------------------------- own loops


def in_units(model: Any) -> nn.Module:
    mw.fully_shard(model[0])
    return mw.fully_shard(model)


def in_parts(model: nn.Module) -> nn.Module:
    mesh = mw.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    return mw.parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": mw.replicate,
    "DistributedDataParallel": mw.DistributedDataParallel,
    "fully_shard": in_units,
    "original": partial(FSDP, use_orig_params=True),
    "flat": partial(FSDP, use_orig_params=False),
    "parallelize_module": in_parts,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        mw.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def body(name: str, folder: Path) -> None:
    """Train, save, and save once more what a second model has loaded."""
    world = communicator()
    model, other = WRAPS[name](made()), WRAPS[name](made())
    share = (0, 1) if name == "parallelize_module" else (world.rank, world.size)
    loader = DataLoader(ROWS, 8, data_rank=share[0], data_size=share[1])
    optimizer, second = momentum(model.parameters()), momentum(other.parameters())
    train(model, optimizer, loader)
    verify_replicated(model)
    checkpoint.save(folder, 1, model=model, optimizer=optimizer, data=loader, random=True)
    checkpoint.load(folder, model=other, optimizer=second, data=loader)
    checkpoint.save(folder, 2, model=other, optimizer=second, data=loader)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRAPS)
def test_a_loop_trains_as_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(2, on_meta, body, name, tmp_path)
    expected, found = made(), made()
    train(expected, momentum(expected.parameters()), DataLoader(ROWS, 8))
    checkpoint.load(tmp_path, model=found)
    torch.testing.assert_close(found.state_dict(), expected.state_dict())
