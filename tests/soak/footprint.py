"""What a process has of the system: memory, descriptors, threads; and of Meshwright's objects."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Parameter

__all__ = ["LIMIT", "Footprint", "footprint", "give_back", "growth", "objects"]

LIMIT = 0.01
"""The part by which nothing may grow in the last four fifths of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one process had at one moment."""

    memory: int
    """Bytes that are resident."""
    descriptors: int
    threads: int
    mappings: int
    """Pieces of memory that are mapped: each thread has one for its stack, each segment one."""

    def __str__(self) -> str:
        megabytes = f"{self.memory / 1e6:.1f} MB"
        return f"{megabytes}, {self.descriptors} descriptors, {self.threads} threads"


def footprint(pid: int | str = "self") -> Footprint:
    """Measure a process, this one after a garbage collection."""
    if pid == "self":
        gc.collect()
    rows = _rows(Path(f"/proc/{pid}/status"))
    return Footprint(
        memory=1024 * rows["VmRSS"],
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=rows["Threads"],
        mappings=len(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()),
    )


def give_back() -> None:
    """Let C's allocator return the whole pages that are free between what this process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def growth(measured: Sequence[Footprint]) -> dict[str, float]:
    """The part by which each quantity has grown since the first fifth of equal stretches.

    One descriptor or thread more or less is no growth: one may be about to go.
    """
    first, last = measured[len(measured) // 5], measured[-1]
    return {
        "memory": last.memory / first.memory - 1,
        "descriptors": max(0, last.descriptors - first.descriptors - 1) / first.descriptors,
        "threads": max(0, last.threads - first.threads - 1) / first.threads,
    }


def objects() -> Counter[str]:
    """The parameters and the objects of Meshwright's classes that are alive, by class.

    Left out is what Meshwright keeps a bounded number of.
    """
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    ours = [
        kind.__name__
        for kind in kinds
        if str(kind.__module__).startswith("meshwright.") or issubclass(kind, Parameter)
    ]
    # The last few operations and their descriptions, places in shared memory, and where threads
    # stood at the last look.
    bounded = ("Call", "Issued", "c_char_Array", "_ThreadPlace")
    return Counter(name for name in ours if not name.startswith(bounded))


def _rows(path: Path) -> dict[str, int]:
    """The numbers of a file of /proc with a name and a number in each line."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
