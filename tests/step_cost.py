"""What one warm step runs of the library's own code, rank 0 of 2, shared memory.

Run it as a program, with src on PYTHONPATH: ``python tests/step_cost.py`` prints

* calls: two counts for each kind of step, the least of some steps: of all calls, and of those
  outside of shared memory, where a wait that takes longer asks more often. The second is the same
  in every run;
* the walk: distinct functions and files, above ``comm`` and in all without shared memory, of a
  forward and a backward without an optimizer. Step 4, which takes a digest of weights, and step 6
  are counted each by itself; the larger numbers count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
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

__all__ = ["PASSES", "STEPS", "Walk", "measure", "walk"]

ROOT = str(Path(meshwright.__file__).parent)
INSIDE = str(Path(ROOT, "comm", "shared_memory"))
COMM = str(Path(ROOT, "comm"))
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


# -------------------------------------------------------------------------------- the walk


class Walk(NamedTuple):
    """Distinct functions and files of ours that one pass runs."""

    above: int
    """Functions above ``comm``."""
    files_above: int
    functions: int
    """Functions outside of shared memory."""
    files: int


def walk_of(step: Callable[[], object]) -> Walk:
    """Count what steps 4 and 6 run; the larger of each number."""
    found: list[Walk] = []
    for number in range(1, 7):
        if number not in (4, 6):
            step()
            continue
        seen: set[CodeType] = set()

        def hear(frame: FrameType, event: str, _: object, seen: set[CodeType] = seen) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(ROOT):
                seen.add(frame.f_code)

        sys.setprofile(hear)
        threading.setprofile(hear)
        try:
            step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        outside = {code for code in seen if not code.co_filename.startswith(INSIDE)}
        above = {code for code in outside if not code.co_filename.startswith(COMM)}
        files = [len({code.co_filename for code in codes}) for codes in (above, outside)]
        found.append(Walk(len(above), files[0], len(outside), files[1]))
    dist.barrier()
    return Walk(*map(max, zip(*found, strict=True)))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def sharded_pass() -> Callable[[], object]:
    model = two_layers()
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    x = torch.randn(4, 8)
    return lambda: model(x).sum().backward()


def replicated_pass() -> Callable[[], object]:
    model, x = replicate(two_layers()), torch.randn(4, 8)
    return lambda: model(x).sum().backward()


PASSES = {"fully_shard": sharded_pass, "replicate": replicated_pass, "1F1B": pipelined_step}


def walk(name: str) -> Walk:
    torch.manual_seed(0)
    return walk_of(PASSES[name]())


if __name__ == "__main__":
    for name in STEPS:
        calls = ranks(2, measure, name)[0]
        print(f"{name:12} {calls.total:6d} {calls.outside:6d}")
    for name in PASSES:
        print(name, ranks(2, walk, name)[0])
