"""Constants from published runs: robust least squares on logarithms, within the ranges.

Predictions are linearized about the constants at hand, a few times over. The loss of a row is near
to its absolute error, so that rows that nothing explains do not pull, and sources count by the root
of their rows, so that none of two hundred rows decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.constants import Constants, priors, ranges

SMALL = 0.03
"""Errors below it are noise: runs repeat themselves within 2 to 5 %."""
LARGE = 0.4
PRIOR = 1e-2
"""Weight of a constant's distance from its default, for its whole range."""


@dataclass(frozen=True)
class Linearized:
    """Logarithms of predicted over measured, and their slopes by each constant's range."""

    at: Constants
    ratios: NDArray[np.float64]
    slopes: NDArray[np.float64]


def linearize(predict: Callable[[Constants], Sequence[float]], at: Constants) -> Linearized:
    """Evaluate ``predict``, which gives predicted over measured of each row, about ``at``."""
    base = np.log(np.array(predict(at)))
    slopes = []
    for name, (low, high) in ranges().items():
        here, step = getattr(at, name), 0.04 * (high - low)
        step = step if here + step <= high else -step
        moved = np.log(np.array(predict(replace(at, **{name: here + step}))))
        slopes.append((moved - base) / (step / (high - low)))
    return Linearized(at, base, np.array(slopes).T)


def fit(
    found: Linearized, sources: Sequence[str], without: str = "", reach: float = 0.5
) -> Constants:
    """Constants that suit all rows but those of ``without``, at most ``reach`` of a range away."""
    counts = {source: sources.count(source) for source in set(sources)}
    weights = np.array([0.0 if s == without else 1 / math.sqrt(counts[s]) for s in sources])
    limits = ranges()

    def shares(constants: Constants) -> NDArray[np.float64]:
        return np.array(
            [(getattr(constants, n) - low) / (high - low) for n, (low, high) in limits.items()]
        )

    at, prior = shares(found.at), shares(priors())
    x = at.copy()
    for _ in range(60):
        errors = np.abs(found.ratios + found.slopes @ (x - at))
        bounded = np.where(errors > LARGE, 0.25, 1.0)
        each = weights * bounded / np.maximum(errors, SMALL)
        total = float(weights.sum())
        square = (found.slopes.T * each) @ found.slopes / total + PRIOR * np.eye(len(x))
        side = -(found.slopes.T * each) @ (found.ratios - found.slopes @ at) / total + PRIOR * prior
        for _ in range(40):
            for k in range(len(x)):
                rest = side[k] - square[k] @ x + square[k, k] * x[k]
                low, high = max(0.0, at[k] - reach), min(1.0, at[k] + reach)
                x[k] = min(high, max(low, rest / square[k, k]))
    values = {
        name: low + float(share) * (high - low)
        for (name, (low, high)), share in zip(limits.items(), x, strict=True)
    }
    return Constants(**values)
