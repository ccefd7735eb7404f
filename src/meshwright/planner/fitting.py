"""Constants from published runs: a robust search, coordinate by coordinate, within the ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.planner.constants import Constants, ranges

__all__ = ["fit"]


def fit(loss: Callable[[Constants], float], start: Constants, rounds: int = 4) -> Constants:
    """Find constants of small ``loss`` from ``start``: steps of each alone, halved each round."""
    best, least = start, loss(start)
    step = 0.25
    for _ in range(rounds):
        for name, (low, high) in ranges().items():
            for sign in (1, -1):
                moved = True
                while moved:
                    moved = False
                    here = getattr(best, name)
                    to = min(high, max(low, here + sign * step * (high - low) * 0.5))
                    if to == here:
                        break
                    tried = replace(best, **{name: to})
                    found = loss(tried)
                    if found < least - 1e-6:
                        best, least, moved = tried, found, True
        step /= 2
    return best


def robust(ratio: float) -> float:
    """The loss of one prediction: the logarithm of its ratio, without much weight beyond 50 %."""
    error = abs(math.log(ratio))
    return error if error < 0.4 else 0.4 + 0.25 * (error - 0.4)


def weighted(losses: Sequence[Sequence[float]]) -> float:
    """Mean over sources, which count by the root of their rows."""
    weights = [math.sqrt(len(rows)) for rows in losses]
    means = [sum(rows) / len(rows) for rows in losses]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
