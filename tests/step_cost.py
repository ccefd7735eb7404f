"""Calls of the library's own functions in one warm step, rank 0 of 2, shared memory.

Run it as a program, with src on PYTHONPATH: ``python tests/step_cost.py`` prints two counts for
each kind of step, the least of some steps: of all calls, and of those outside of shared memory,
where a wait that takes longer asks more often. The second is the same in every run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import meshwright
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.data_parallel import fully_shard, replicate
from meshwright.pipelining import PipelineStage, Schedule1F1B
from meshwright.plan import Plan
from meshwright.testing import ranks

__all__ = ["STEPS", "measure"]

ROOT = str(Path(meshwright.__file__).parent)
INSIDE = str(Path(ROOT, "comm", "shared_memory"))
WARM = 6
COUNTED = 5


class Calls(NamedTuple):
    """Frames of ours that a step enters."""

    outside: int
    """Of these, the frames outside of shared memory."""
    total: int


def calls_of(step: Callable[[], object]) -> Calls:
    """Count the frames of some warm steps; the least of each kind."""
    for _ in range(WARM):
        step()
    dist.barrier()
    files: list[str] = []

    def hear(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename)

    found: list[Calls] = []
    for _ in range(COUNTED):
        files.clear()
        sys.setprofile(hear)
        try:
            step()
        finally:
            sys.setprofile(None)
        outside = sum(not file.startswith(INSIDE) for file in files)
        found.append(Calls(outside, len(files)))
    dist.barrier()
    return Calls(min(calls.outside for calls in found), min(calls.total for calls in found))


def training(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])


def replicated_step() -> Callable[[], object]:
    return training(replicate(layers()))  # 16 parameters, all in one bucket


def sharded_step() -> Callable[[], object]:
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return training(model)


def pipelined_step() -> Callable[[], object]:
    world = communicator()
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 8), torch.randn(8, 8)

    def step() -> None:
        module.zero_grad()
        if world.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)

    return step


def trainable_step() -> Callable[[], object]:
    trainable = parallelize(
        layers(),
        Plan.from_toml("[axes]\nreplicate = 2\n"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss=nn.functional.mse_loss,
    )
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    return lambda: trainable.step(x, y)


STEPS = {
    "replicate": replicated_step,
    "fully_shard": sharded_step,
    "1F1B": pipelined_step,
    "Trainable": trainable_step,
}


def measure(name: str) -> Calls:
    torch.manual_seed(0)
    return calls_of(STEPS[name]())


if __name__ == "__main__":
    for name in STEPS:
        calls = ranks(2, measure, name)[0]
        print(f"{name:12} {calls.total:6d} {calls.outside:6d}")
