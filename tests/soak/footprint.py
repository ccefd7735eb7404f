"""What a process has of the system: memory, descriptors, threads; and of Meshwright's objects."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Parameter

__all__ = ["Footprint", "footprint", "objects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one process had at one moment."""

    memory: int
    """Bytes of this process alone: what would come back if it ended (proportional share)."""
    descriptors: int
    threads: int
    mappings: int
    """Pieces of memory that are mapped: each thread has one for its stack, each segment one."""


def footprint(pid: int | str = "self") -> Footprint:
    """Measure a process, this one after a garbage collection."""
    if pid == "self":
        gc.collect()
    rows = _rows(Path(f"/proc/{pid}/smaps_rollup"))
    return Footprint(
        memory=1024 * rows["Pss"],
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=_rows(Path(f"/proc/{pid}/status"))["Threads"],
        mappings=len(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()),
    )


def objects() -> Counter[str]:
    """The parameters and the objects of Meshwright's classes that are alive, by class.

    Left out is what a bounded number is remembered of: operations, descriptions of calls, and
    places in shared memory.
    """
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    ours = [
        kind.__name__
        for kind in kinds
        if str(kind.__module__).startswith("meshwright.") or issubclass(kind, Parameter)
    ]
    remembered = ("Call", "Issued", "c_char_Array")
    return Counter(name for name in ours if not name.startswith(remembered))


def _rows(path: Path) -> dict[str, int]:
    """The numbers of a file of /proc with a name and a number in each line."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
