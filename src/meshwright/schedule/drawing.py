"""A schedule as text: one line a rank, one column a time slot, marks at the cells in question."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.schedule.actions import Schedule

MARK = "<-- ERROR HERE"
"""Stands behind a cell that is wrong."""

AROUND = 6
"""Cells shown before and after a marked one, where a row is too long to show whole."""

WHOLE = 40
"""Cells up to which a row is shown whole."""


def draw(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Find the rows of ``schedule``; ``marks`` gives for ranks the position of a marked cell.

    A position behind the last cell marks the end of the row. Long rows without a mark are cut at
    the end, those with one around it.
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
