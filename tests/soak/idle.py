"""Five idle minutes of all ranks in mid-run: training goes on where it was, and nobody says a word.

Run it as ``python tests/soak/idle.py [--seconds 300]``, with src and tests on PYTHONPATH. Two ranks
build a model of each kind, train all of them, do nothing for a while, and train on. Exits with
status 1 when a rank fails, logs a warning, has more descriptors or threads than before, or trains
on with other numbers than ranks that did not idle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import meshwright as mw
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.plan import PipelinePlan, Plan
from meshwright.testing import MODELS, ranks
from soak.crowd import listening
from soak.footprint import footprint
from soak.lifetimes import mlp
from soak.table import Table
from support.internals.axes import Axes

__all__ = ["trains_on"]


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], float]:
    model = wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _planned(**axes: int) -> Callable[[], float]:
    sample = MODELS["sequential"]
    pipeline = PipelinePlan(microbatches=2) if "pipeline" in axes else PipelinePlan()
    inputs, targets = sample.example_batch(8, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    trainable = parallelize(
        sample.build(),
        Plan(axes=Axes.of(axes), pipeline=pipeline),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss=sample.loss,
        example=(inputs,),
    )
    share = 8 // trainable.data_size
    mine = slice(trainable.data_rank * share, (trainable.data_rank + 1) * share)
    return lambda: float(trainable.step(inputs[mine], targets[mine]).loss)


def trains_on(seconds: float) -> tuple[list[str], list[float]]:
    """Train, idle for ``seconds``, train on: what is wrong afterwards, and the losses."""
    found: list[str] = []
    with listening() as words:
        steps = [
            _wrapped(mw.replicate),
            _wrapped(mw.DistributedDataParallel),
            _wrapped(mw.fully_shard),
            _wrapped(FullyShardedDataParallel),
            _planned(replicate=2),
            _planned(shard=2),
            _planned(pipeline=2),
        ]
        losses = [step() for _ in range(3) for step in steps]
        before = footprint()
        time.sleep(seconds)
        losses += [step() for _ in range(3) for step in steps]
        communicator().barrier()
        after = footprint()
    if after.descriptors > before.descriptors + 1 or after.threads > before.threads + 1:
        found.append(f"before: {before}; after: {after}")
    return [*words, *found], losses


def check(backend: str, seconds: float) -> tuple[str, str]:
    """Run the ranks with and without the pause; what to show, and what went wrong."""
    with_pause = ranks(2, trains_on, seconds, timeout=seconds + 300, backend=backend)
    without = ranks(2, trains_on, 0.0, timeout=300, backend=backend)
    problems = [f"rank {rank}: {x}" for rank, (said, _) in enumerate(with_pause) for x in said]
    if [losses for _, losses in with_pause] != [losses for _, losses in without]:
        problems.append("the losses differ from those of ranks that did not idle")
    return f"{len(with_pause[0][1]) // 2} steps before and after", "; ".join(problems)


def main() -> int:
    """Idle on both backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--backends", default="shm,gloo")
    given = parser.parse_args()
    table = Table(f"{given.seconds:.0f} idle seconds of 2 ranks", ["what went on"])
    for backend in given.backends.split(","):
        table.row(backend, partial(check, backend, given.seconds))
    return table.end()


if __name__ == "__main__":
    raise SystemExit(main())
