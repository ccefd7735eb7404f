"""Schedules as text, one line per rank, one cell per time slot: as CSV, and drawn in errors.

An empty cell is an idle slot::

    # meshwright schedule 1: name=1f1b microbatches=2 stage_ranks=0,1 edges=0-1
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

Files of torch's pipelining have no such header; its contents are then inferred from the actions.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import Action, Schedule
from meshwright.schedule.messages import parts_of

VERSION = 1
_HEADER = re.compile(
    r"# meshwright schedule (\d+): name=(\S+) microbatches=(\d+) stage_ranks=([\d,]+)"
    r" edges=([\d,-]*)"
)


def to_csv(schedule: Schedule) -> str:
    """Convert ``schedule`` to text that `parse_csv` parses to an equal value."""
    edges = ",".join(f"{source}-{target}" for source, target in schedule.edges)
    ranks = ",".join(map(str, schedule.stage_ranks))
    name = re.sub(r"\s+", "-", schedule.name) or "unnamed"
    file = io.StringIO()
    file.write(
        f"# meshwright schedule {VERSION}: name={name} microbatches={schedule.microbatches} "
        f"stage_ranks={ranks} edges={edges}\n"
    )
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows(["" if a is None else str(a) for a in row] for row in schedule.rows)
    return file.getvalue()


def dump_csv(schedule: Schedule, target: str | Path | TextIO) -> None:
    """Write ``schedule`` to a path or to an open text file."""
    if isinstance(target, str | Path):
        with open(target, "w", encoding="utf-8", newline="") as file:
            file.write(to_csv(schedule))
    else:
        target.write(to_csv(schedule))


def load_csv(source: str | Path | TextIO) -> Schedule:
    """Read a schedule from a path or from an open text file; see `parse_csv`."""
    if isinstance(source, str | Path):
        with open(source, encoding="utf-8", newline="") as file:
            return parse_csv(file.read(), str(source))
    return parse_csv(source.read(), getattr(source, "name", "CSV"))


def parse_csv(text: str, source: str = "CSV") -> Schedule:
    """Parse the schedule in ``text``, which error messages call ``source``.

    Raises ``ValueError`` with row, column and text of an invalid action, `ScheduleError` if the
    ranks of stages cannot be inferred.
    """
    lines = text.splitlines(keepends=True)
    header = None
    if lines and lines[0].startswith("#"):
        header = _HEADER.fullmatch(lines[0].rstrip("\r\n"))
        if header is None or int(header[1]) != VERSION:
            raise ValueError(
                f"{source}, row 1: expected '# meshwright schedule {VERSION}: name=.. "
                f"microbatches=.. stage_ranks=.. edges=..', found {lines[0].strip()!r}"
            )
        lines = lines[1:]
    first = 1 if header is None else 2
    try:
        cells = list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise ValueError(f"{source}: not a CSV file: {error}") from error
    rows = [
        [_action(cell, source, first + row, column) for column, cell in enumerate(line, 1)]
        for row, line in enumerate(cells)
    ]
    if not rows:
        raise ValueError(f"{source}: expected one row a rank, found none")
    if header is None:
        return _inferred(rows, source)
    ranks = _numbers(header[4], source)
    edges = [_numbers(edge, source, "-") for edge in header[5].split(",") if edge]
    if any(len(edge) != 2 for edge in edges):
        raise ValueError(f"{source}, row 1: expected edges such as 0-1,1-2, found {header[5]!r}")
    return Schedule.of(header[2], rows, ranks, int(header[3]), ((s, t) for s, t in edges))


def _numbers(text: str, source: str, separator: str = ",") -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(separator))
    except ValueError as error:
        raise ValueError(f"{source}, row 1: expected numbers, found {text!r}") from error


def _action(cell: str, source: str, row: int, column: int) -> Action | None:
    text = cell.strip()
    if not text:
        return None
    try:
        return Action.parse(text)
    except RuntimeError as error:
        raise ValueError(f"{source}, row {row}, column {column}: {error}") from error


def _inferred(rows: list[list[Action | None]], source: str) -> Schedule:
    holders: dict[int, int] = {}
    last = -1
    for rank, row in enumerate(rows):
        for part in (part for a in row if a is not None for part in parts_of(a)):
            if holders.setdefault(part.stage, rank) != rank:
                raise ScheduleError(
                    f"{source}: stage {part.stage} is on rank {holders[part.stage]} and, by "
                    f"{part}, on rank {rank}"
                )
            last = max(last, -1 if part.microbatch is None else part.microbatch)
    missing = sorted(set(range(max(holders, default=-1) + 1)) - set(holders))
    if missing or not holders:
        raise ScheduleError(f"{source}: there are no actions of stages {missing or 'at all'}")
    return Schedule.of("csv", rows, [holders[stage] for stage in sorted(holders)], last + 1)


MARK = "<-- ERROR HERE"
"""The mark after a faulty cell."""

AROUND = 6
"""Cells shown before and after a marked one in a long row."""

WHOLE = 40
"""The number of cells up to which a row is shown in full."""


def draw(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Draw the rows of ``schedule``; ``marks`` maps ranks to the position of a marked cell.

    A position after the last cell marks the end of the row. Long rows are truncated: around the
    mark, or at the end without one.
    """
    found = marks or {}
    width = max((len(str(a)) for row in schedule.rows for a in row if a is not None), default=1)
    label = len(str(max(0, schedule.ranks - 1)))
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells = ["." if action is None else str(action) for action in row]
        at = found.get(rank)
        first, last = _window(len(cells), at)
        shown = [cell.ljust(width) for cell in cells[first:last]]
        if at is not None:
            place = min(at, len(cells)) - first
            if place == len(shown):
                shown.append("(end)")
            shown[place] = f"{shown[place].rstrip()} {MARK}"
        before = [f"({first} more)"] if first else []
        after = [f"({len(cells) - last} more)"] if last < len(cells) else []
        lines.append(f"rank {rank:>{label}}: " + " ".join([*before, *shown, *after]).rstrip())
    return "\n".join(lines)


def _window(length: int, at: int | None) -> tuple[int, int]:
    if length <= WHOLE:
        return 0, length
    if at is None:
        return 0, WHOLE
    return max(0, at - AROUND), min(length, at + AROUND + 1)
