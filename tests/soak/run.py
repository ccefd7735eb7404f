"""The endurance programs of one part, one after the other, with the last lines of each.

Run it as ``make soak PART=1``; without a part it says what there is. The programs run in processes
of their own, from the working tree. Exits with status 1 when one of them is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["PARTS", "run"]

ROOT = Path(__file__).parents[2]
LAST = 12
"""Lines of each program that are shown at the end."""

ON_DEVICES = (
    *("gradients", "tensor_parallel", "pipelining", "composition", "recipes"),
    *("data_parallel", "expert_parallel", "context_parallel", "fsdp"),
)
"""Rooms whose tests on ranks run on simulated devices."""

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "1": {
        "5,000 cases of the fuzzer": ("tests/fuzz", "--cases", "5000"),
        "1,000 cases of the fuzzer with axis expert": (
            *("tests/fuzz", "--cases", "1000", "--experts"),
        ),
        "1,000 cases of the fuzzer with axis context": (
            *("tests/fuzz", "--cases", "1000", "--context"),
        ),
        "ranks killed at any moment": ("tests/soak/kills.py",),
        "ranks killed and stopped inside of attention and of experts": (
            *("tests/soak/kills.py", "--inside"),
        ),
        "ranks killed in each phase of a save in the background": ("tests/soak/saves.py",),
        "ranks and agents of torchrun killed": ("tests/soak/torchrun.py",),
        "ranks that are slow": ("tests/soak/slow_ranks.py",),
        "1,000 groups, models made and deleted": ("tests/soak/lifetimes.py",),
        "5,000 steps": ("tests/soak/steps.py",),
        "five idle minutes": ("tests/soak/idle.py",),
        "16 and 32 ranks": ("tests/soak/crowd.py",),
        "make train beside four busy loops": ("tests/soak/busy_train.py",),
        "300 steps of experts on 4 ranks as in one process": ("tests/soak/experts.py",),
        "the same with parts of windows": (
            *("tests/soak/experts.py", "--axes", "context=2", "expert=2"),
        ),
    },
    "3": {"whole products, and cases of random numbers": ("-m", "pytest", "-m", "soak", "-n", "2")},
    "4": {
        "32 processes of meshwright train": (
            *("tests/soak/busy_train.py", "--loops", "0", "--steps", "3"),
            *("--axes.replicate", "2", "--axes.shard", "16", "--model.layers", "2"),
            *("--run.check_parity", "false"),
        ),
        "all quick tests on ranks with all their cases, on simulated devices": (
            *("-m", "pytest", "--ranks-devices", "simulated", "-n", "2", "--dist", "worksteal"),
            *("-m", "few or not (slow or soak)"),
            *(f"tests/{room}" for room in ON_DEVICES),
        ),
    },
}
"""The programs of each part, by what they show, with their arguments."""


def run(part: str) -> int:
    """Run the programs of ``part``; the exit status."""
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    ends: list[str] = []
    missed = 0
    for title, words in PARTS[part].items():
        print(f"== {title}: {' '.join(words)}", flush=True)
        begun = time.monotonic()
        lines: list[str] = []
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
        missed += program.returncode != 0
        word = "held" if program.returncode == 0 else f"MISSED (status {program.returncode})"
        ends.append(f"== {word} in {time.monotonic() - begun:.0f} s: {title}")
        ends.extend(f"   {line}" for line in lines[-LAST:])
    print("\n".join(["", f"part {part}, in short", *ends]))
    print(f"{len(PARTS[part]) - missed} of {len(PARTS[part])} programs held")
    return 1 if missed else 0


def main(words: list[str]) -> int:
    """Run a part, or say what there is."""
    if len(words) == 1 and words[0] in PARTS:
        return run(words[0])
    for part, programs in PARTS.items():
        print(f"make soak PART={part}")
        for title, command in programs.items():
            print(f"    {title:40} {' '.join(command)}")
    return 2 if words else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
