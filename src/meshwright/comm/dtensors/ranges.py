"""Ranges of rows along each dim of a tensor, and the boxes that they make.

A strided placement gives a rank rows from several places along a dim, laid end to end::

    rows 0 1 . . 4 5 . .      [(0, 2), (4, 2)]      in a local tensor of four rows
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from meshwright.layout import Box

Ranges = list[tuple[int, int]]
"""(first row, rows) of the whole along one dim, in the order in which a local tensor has them."""


def boxes_in(ranges: Sequence[Ranges], local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """List the boxes of ``ranges``, each with its memory in ``local``."""
    found: list[tuple[Box, torch.Tensor]] = []
    starts = [list(itertools.accumulate((n for _, n in held), initial=0)) for held in ranges]
    for numbers in itertools.product(*(range(len(held)) for held in ranges)):
        cut = [held[number] for held, number in zip(ranges, numbers, strict=True)]
        box = Box(tuple(a for a, _ in cut), tuple(n for _, n in cut))
        at = [held[number] for held, number in zip(starts, numbers, strict=True)]
        found.append((box, local[Box(tuple(at), box.shape).slices()]))
    return found


def length_of(ranges: Ranges) -> int:
    """Count the rows."""
    return sum(rows for _, rows in ranges)


def narrowed(ranges: Ranges, start: int, count: int) -> Ranges:
    """Cut ``count`` rows from row ``start`` on out of ``ranges`` laid end to end."""
    found: Ranges = []
    for first, rows in ranges:
        skipped = min(start, rows)
        taken = min(rows - skipped, count)
        if taken:
            found.append((first + skipped, taken))
        start, count = start - skipped, count - taken
    return found
