"""The main job for thousands of steps: nothing that a rank has of the system grows.

Run it as ``python tests/soak/steps.py [--steps 5000] [--only shard]``, with src and tests on
PYTHONPATH. Tiny models on two ranks, in each layout on both backends, with checkpoints, validation
and metrics as in any run. Memory, descriptors and threads of every rank may grow by less than 1 %
in the last four fifths of the steps. Exits with status 1 when they do. Free pages between what a
rank holds are given back before it is measured: the allocator of C keeps 1.6 % more in 2,500 steps
of axis tensor, and has as much in use.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

from meshwright.comm import connect
from meshwright.testing import ranks
from soak.footprint import LIMIT, Footprint, footprint, give_back, growth
from soak.table import Table
from support.internals.recipes import train
from support.recipes.runs import read_run, write_text

__all__ = ["LAYOUTS", "measured_run"]

LAYOUTS = {
    "replicate": ("axes.replicate=2",),
    "shard": ("axes.shard=2",),
    "pipeline": ("axes.pipeline=2", "pipeline.microbatches=2"),
    "tensor": ("axes.tensor=2", "tensor.rules=language-model"),
}
POINTS = 20
"""How often a run is measured."""


def measured_run(folder: Path, steps: int, *overrides: str) -> list[list[Footprint]]:
    """Train on this rank; on rank 0 the footprints of each rank, at equal distances."""
    world = connect()
    every = max(1, steps // POINTS)
    config = read_run(
        folder,
        f"run.steps={steps}",
        f"run.log_every={every}",
        f"run.save_every={every}",
        f"run.validate_every={2 * every}",
        "run.keep_last=2",
        "train.clip_norm=1.0",
        *overrides,
    )
    rows = world.gather_bytes(str(os.getpid()).encode(), label="process ids")
    pids = [int(row) for row in rows]
    found: list[list[Footprint]] = [[] for _ in pids]

    def tell(line: str) -> None:
        if not line.startswith("step ") or "tokens/s" not in line:
            return
        give_back()
        if world.rank == 0:
            for measured, pid in zip(found, pids, strict=True):
                measured.append(footprint(pid))

    outcome = train(config, world, tell)
    assert outcome.is_finished
    return found


def check(layout: str, backend: str, steps: int) -> tuple[str, str]:
    """Run one layout; what to show, and what grew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        limit = 120 + steps
        runs = ranks(
            2, measured_run, folder, steps, *LAYOUTS[layout], timeout=limit, backend=backend
        )
    grown = [growth(measured) for measured in runs[0]]
    most = {what: max(row[what] for row in grown) for what in grown[0]}
    shown = f"{runs[0][0][-1]}; grown by " + ", ".join(f"{v:.2%} {k}" for k, v in most.items())
    problem = ", ".join(
        f"{what} grew by {part:.2%}" for what, part in most.items() if part >= LIMIT
    )
    return shown, problem


def main() -> int:
    """Run all layouts on both backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--only", default="", help="layouts, with commas between them")
    parser.add_argument("--backends", default="shm,gloo")
    given = parser.parse_args()
    table = Table(f"{given.steps} steps on 2 ranks", ["rank 0 at the end; growth of any rank"])
    for layout in given.only.split(",") if given.only else LAYOUTS:
        for backend in given.backends.split(","):
            table.row(f"{layout}, {backend}", partial(check, layout, backend, given.steps))
    return table.end()


if __name__ == "__main__":
    raise SystemExit(main())
