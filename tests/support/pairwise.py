"""A small set of rows of a product in which every pair of values of two columns occurs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence

Row = tuple[Hashable, ...]


def pairs_of(row: Row) -> set[tuple[int, Hashable, int, Hashable]]:
    """Each two columns of ``row`` with their values."""
    numbered = list(enumerate(row))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def pairwise(
    columns: Sequence[Sequence[Hashable]], is_legal: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Legal rows that together hold every pair that any legal row holds; always the same ones.

    Greedy: the next row is the one with the most pairs that are still missing, the first of the
    product among equals.
    """
    legal = [row for row in itertools.product(*columns) if is_legal(row)]
    held = [pairs_of(row) for row in legal]
    missing = set().union(*held)
    # What a row adds never grows, so that a count that still holds at the top is the largest.
    waiting = [(-len(pairs), number) for number, pairs in enumerate(held)]
    heapq.heapify(waiting)
    chosen: list[Row] = []
    while missing:
        count, number = waiting[0]
        now = len(held[number] & missing)
        if now < -count:
            heapq.heapreplace(waiting, (-now, number))
            continue
        chosen.append(legal[number])
        missing -= held[number]
    return chosen
