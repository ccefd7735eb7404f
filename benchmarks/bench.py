"""The programs of this folder as one table: what we cost over torch, over the limit, and the aim.

    python benchmarks/bench.py                    # under 25 minutes on two cores
    QUICK=1 python benchmarks/bench.py            # the small models of some, in five
    python benchmarks/bench.py --json figures.json --only "data parallel"
    python benchmarks/bench.py --against ../older/src --turns 5 --only "Python and construction"

The programs run one after the other, each in processes of its own; within each the arms take turns
in short rounds, and a ratio is taken within a round: see their own heads for what they compare.
Printed is a Markdown table of medians and quartiles: rows in which torch is ahead first, then rows
that miss their aim, then the others. What is aimed at and was not measured, as a program failed, is
named behind it, and the status is 1. On a machine with a GPU `devices.py` runs, too.

Beside each row stands its limit, where it has one: ``memcpy``, ``compute`` (one process) and
``floor`` (with the schedule's own bubble), a raw write or read, ``bare`` (the same operations
written by hand), ``plain`` (the model without any parallelism, over the same peer).

``--against`` runs each program by turns on this source and on another one. Its table has, for each
row, the median and quartiles of both over all turns, and what this source costs over the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from _figures import FILE, quartiles

__all__ = ["main"]

HERE = Path(__file__).parent
BEST = "over torch's best, CPU"
UNITS = (60, 240, 960)
PEERS = ("plain", "ddp", "ddp view", "ddp static", "fsdp1 flat", "fsdp1 orig", "fsdp2")
SHARDED = ("fully_shard", "facade flat")
STEPS = ("ddp", "class", "replicate")
WORK_OF_UNITS = ("Python a unit and step", "construction a unit")

AIMS: dict[str, float] = {
    f"tiny, gloo: replicate {BEST}": 0.95,
    f"tiny, shm: replicate {BEST}": 0.90,
    f"gpt, gloo: replicate {BEST}": 0.98,
    f"gpt, shm: replicate {BEST}": 0.93,
    f"net, shm: replicate {BEST}": 0.55,
    f"tiny, gloo: fully_shard {BEST}": 0.50,
    f"net, gloo: fully_shard {BEST}": 0.50,
    f"gpt, gloo: fully_shard {BEST}": 0.88,
    f"tiny, shm: fully_shard {BEST}": 0.35,
    f"net, shm: fully_shard {BEST}": 0.30,
    f"gpt, shm: fully_shard {BEST}": 0.78,
    "2 ranks, 64MB all_reduce: staged over memcpy": 1.3,
    "2 ranks, 64MB all_gather: staged over memcpy": 1.3,
    "2 ranks, 64MB reduce_scatter: staged over memcpy": 1.3,
    **{
        f"transfers, {name}: ours gloo over torch, cpu": 0.75
        for name in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
    **{
        f"gpt8, {name}: ours shm, CPU over compute": 1.08
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    },
    "tensor small, SGD: ours shm over bare shm, CPU": 1.2,
    **{
        f"experts {work}: ours {exchange} over bare shm, CPU": 1.1
        for work in ("layer", "exchange")
        for exchange in ("tokens", "pairs")
    },
    **{
        f"context {work}: ours all-to-all over bare shm, CPU": 1.1
        for work in ("attention", "short", "exchange")
    },
    "checkpoint, 1,000 small tensors: save over a raw write": 3.0,
    "checkpoint, 1,000 small tensors: load over a raw read of new memory": 4.0,
    "checkpoint, 1,000 small tensors: load_into over a raw read": 4.0,
    "checkpoint, 200 MB: load over a raw read of new memory": 2.0,
    "checkpoint, 200 MB: load_into over a raw read": 2.0,
    "checkpoint, 300 MB: a save in the background over a memory copy": 1.2,
    "checkpoint, 100,000 tensors: verify, s": 10.0,
    **{
        f"{what}, {units} units: {arm}, us": aim
        for units in UNITS
        for arm, *aims in (("fully_shard", 200.0, 1200.0), ("facade flat", 120.0, 1200.0))
        for what, aim in zip(WORK_OF_UNITS, aims, strict=True)
    },
    **{
        f"{what}: {arm}, {units} over {UNITS[0]} units": 1.1
        for what in WORK_OF_UNITS
        for arm in ("fully_shard", "facade flat")
        for units in UNITS[1:]
    },
    **{
        f"2 ranks, 4KB {kind}: staged over bare": 1.5
        for kind in ("barrier", "reduce_scatter", "ring")
    },
    **{
        f"compiled step, {backend}: {arm} over torch, CPU": 1.1
        for backend in ("gloo", "shm")
        for arm in STEPS[1:]
    },
    **{f"loss in chunks, {work}: ours over all logits, CPU": 1.1 for work in ("small", "wide")},
    "compiled gpt, shm: fully_shard compiled over eager, above plain's": 0.05,
    "first use, s: replicate more than ddp": 0.3,
}
"""At most; what is in neither table is shown without one."""
LIMITS = ("memcpy", "compute", "a raw write", "a raw read", "bare", "floor")
"""What a row is over, where that is the limit itself."""
LEAST: dict[str, float] = {"4 ranks, 64MB ring: gloo over staged": 2.0}
"""At least."""


@dataclass(frozen=True)
class Run:
    """One program, and the arguments with which it runs."""

    title: str
    words: tuple[str, ...]
    quick: tuple[str, ...] | None = None
    """Arguments beside, of a quick run; None where it is left out of one."""


RUNS = (
    Run(
        "data parallel, Gloo",
        ("data_parallel.py", "--rounds", "3", "--arms", *PEERS, *SHARDED, "replicate"),
        ("--models", "tiny"),
    ),
    Run(
        "data parallel, shared memory",
        (
            *("data_parallel.py", "--backend", "shm", "--rounds", "3"),
            *("--arms", *PEERS, *SHARDED, "replicate"),
        ),
        ("--models", "tiny"),
    ),
    Run(
        "data parallel, memory",
        (
            *("data_parallel.py", "--memory", "--backend", "shm", "--models", "gpt"),
            *(
                "--arms",
                "plain",
                "ddp view",
                "replicate",
                "replicate view",
                "fsdp1 flat",
                "fsdp2",
                *SHARDED,
            ),
        ),
    ),
    Run(
        "data parallel, Python and construction",
        (
            *("data_parallel.py", "--python-per-unit", "--rounds", "2"),
            *("--arms", "plain", "fsdp1 flat", "fsdp2", *SHARDED),
            *("--units", *map(str, UNITS)),
        ),
        ("--units", "60"),
    ),
    Run(
        "collectives, 2 ranks",
        ("collectives.py", "--ranks", "2", "--sizes", "4KB", "64MB"),
        ("--rounds", "3"),
    ),
    Run("collectives, 4 ranks", ("collectives.py", "--ranks", "4", "--sizes", "64MB")),
    Run(
        "pipelining, small stages",
        ("pipelining.py", "--part", "transfers"),
        ("--schedules", "1F1B", "--rounds", "3"),
    ),
    Run("pipelining, gpt8", ("pipelining.py", "--part", "step")),
    Run(
        "tensor parallel",
        ("tensor_parallel.py", "--optimizers", "SGD"),
        ("--works", "small", "--rounds", "3"),
    ),
    Run("experts", ("experts.py",), ("--works", "exchange", "--rounds", "3")),
    Run("context", ("context.py",), ("--works", "exchange", "--rounds", "3")),
    Run("losses", ("losses.py", "--works", "small", "wide"), ("--works", "small", "--rounds", "3")),
    Run(
        "compiled",
        (
            *("compiled.py", "--models", "gpt", "--backend", "shm", "--rounds", "5", "--arms"),
            *("plain", "plain compiled", "ddp view", "ddp compiled", "replicate"),
            *("replicate compiled", "fully_shard", "fully_shard compiled"),
        ),
    ),
    *(
        Run(
            f"compiled step, {backend}",
            ("compiled_step.py", "--backend", backend, "--rounds", "7", "--arms", *STEPS),
        )
        for backend in ("gloo", "shm")
    ),
    Run("checkpoints over raw", ("checkpoint.py", "--raw"), ("--rounds", "3")),
    Run("checkpoints of many tensors", ("checkpoint.py",)),
    Run("checkpoints in the background", ("checkpoint.py", "--background")),
    Run("first use", ("first_use.py", "--rounds", "3")),
)


ON_GPU = Run("one GPU", ("devices.py",), ("--models", "tiny", "--rounds", "3"))


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    median: float
    low: float
    high: float
    limit: str = ""
    """What no program can be below, and how much that is."""

    @property
    def aim(self) -> str:
        """The bound that is aimed at; empty where there is none."""
        if self.name in AIMS:
            return f"at most {AIMS[self.name]:g}"
        return f"at least {LEAST[self.name]:g}" if self.name in LEAST else ""

    @property
    def is_behind_torch(self) -> bool:
        """True where torch is ahead."""
        is_more = "more than" in self.name and self.median > 0.0
        return is_more or ("over torch" in self.name and self.median > 1.0)

    @property
    def is_missed(self) -> bool:
        """True where there is an aim, and it is not met."""
        return self.median > AIMS.get(self.name, inf) or self.median < LEAST.get(self.name, -inf)

    def row(self) -> str:
        """Write its line of the table."""
        state = "torch ahead" if self.is_behind_torch else "missed" if self.is_missed else ""
        found = f"{self.median:.3g} ({self.low:.3g}..{self.high:.3g})"
        return (
            f"| {self.name} | {found} | {self.aim} | {self.limit or _limit(self.name)} | {state} |"
        )


def _limit(name: str) -> str:
    """Say what a ratio to a limit has beside it."""
    return next((f"{word} 1" for word in LIMITS if f"over {word}" in name), "")


def table(figures: list[Figure]) -> str:
    """Write the table in Markdown, what asks for work first."""
    ordered = sorted(figures, key=lambda each: (not each.is_behind_torch, not each.is_missed))
    head = ["| What | Median (quartiles) | Aim | Limit | |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(each.row() for each in ordered)])


def perform(run: Run, path: Path, *, is_quick: bool, src: Path = HERE.parent / "src") -> bool:
    """Run a program on the library in ``src``, figures to ``path``; True where it ends well."""
    words = [*run.words, *(run.quick or () if is_quick else ())]
    print(f"== {run.title}: {' '.join(words)}", flush=True)
    begun = time.monotonic()
    environment = {**os.environ, FILE: str(path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{src}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-W", "ignore", str(HERE / words[0]), *words[1:]]
    status = subprocess.run(command, check=False, env=environment).returncode
    print(
        f"   {time.monotonic() - begun:.0f} s{f', status {status}' if status else ''}", flush=True
    )
    return status == 0


def compare(chosen: list[Run], other: Path, turns: int, *, is_quick: bool) -> int:
    """Run each program by turns on ``other`` and on this source; print both; the exit status.

    A row is worse where this source costs more than 3 % above the other, and the quartiles of the
    turns lie apart; it is unclear where it costs as much and they do not.
    """
    sources = {"other": other.resolve(), "this": HERE.parent / "src"}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    failed: set[str] = set()
    for turn in range(turns):
        for run in chosen:
            for which in sorted(sources, reverse=turn % 2 == 1):
                with tempfile.NamedTemporaryFile() as file:
                    path = Path(file.name)
                    if not perform(run, path, is_quick=is_quick, src=sources[which]):
                        failed.add(f"{run.title} ({which})")
                    for line in path.read_text().splitlines():
                        row = json.loads(line)
                        found[row["name"]][which].append(row["median"])
    print("\n| What | other | this | this over other | |\n|---|---|---|---|---|")
    worse = 0
    for name, values in found.items():
        if values.keys() != sources.keys():
            continue
        before, now = quartiles(values["other"]), quartiles(values["this"])
        if min(before[0], now[0]) <= 0.0:
            continue  # a difference around zero has no ratio
        if name in LEAST:
            ratio, is_apart = before[1] / now[1], now[2] < before[0]
        else:
            ratio, is_apart = now[1] / before[1], now[0] > before[2]
        state = "" if ratio <= 1.03 else "worse" if is_apart else "unclear"
        worse += state == "worse"
        shown = (f"{middle:.3g} ({low:.3g}..{high:.3g})" for low, middle, high in (before, now))
        print(f"| {name} | {' | '.join(shown)} | {ratio:.3f} | {state} |")
    print(f"\n{len(found)} rows of {turns} turns: {worse} worse")
    if failed:
        print(f"failed: {', '.join(sorted(failed))}")
    return 1 if failed else 0


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose title holds this")
    parser.add_argument("--json", help="write the figures to this file, too")
    parser.add_argument("--against", type=Path, help="the src of another version, by turns")
    parser.add_argument("--turns", type=int, default=3, help="of each version")
    options = parser.parse_args()
    is_quick = os.environ.get("QUICK", "") not in ("", "0")
    runs = [*RUNS, *([ON_GPU] if torch.cuda.is_available() else [])]
    chosen = [run for run in runs if options.only in run.title]
    chosen = [run for run in chosen if not is_quick or run.quick is not None]
    if not chosen:
        parser.error(f"--only {options.only}: expected a part of {[run.title for run in runs]}")
    if options.against is not None:
        if not (options.against / "meshwright").is_dir():
            parser.error(f"--against {options.against}: no folder meshwright in it")
        return compare(chosen, options.against, options.turns, is_quick=is_quick)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures"
        path.touch()
        failed = [run.title for run in chosen if not perform(run, path, is_quick=is_quick)]
        figures = [Figure(**json.loads(line)) for line in path.read_text().splitlines()]
    print(f"\n{table(figures)}")
    missed = sum(each.is_missed for each in figures)
    behind = sum(each.is_behind_torch for each in figures)
    print(f"\n{len(figures)} rows: torch is ahead in {behind}, {missed} miss their aim")
    if options.json:
        rows = [{**vars(each), "aim": each.aim} for each in figures]
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if failed:
        print(f"failed: {', '.join(failed)}")
    absent = sorted({*AIMS, *LEAST} - {each.name for each in figures})
    if absent and chosen == runs and not is_quick:
        print(f"not measured: {'; '.join(absent)}")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
