"""What a program of this folder has measured, for the one table of `bench.py`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence

__all__ = ["FILE", "note", "quartiles"]

FILE = "MESHWRIGHT_FIGURES"
"""The variable of the environment that names the file to which figures are added, line by line."""


def note(name: str, values: Sequence[float], limit: str = "") -> None:
    """Add the median of ``values``, and their quartiles, to the file of figures, where one is.

    ``limit`` says what no program can be below, and how much that is.
    """
    path = os.environ.get(FILE)
    if path and values:
        low, middle, high = quartiles(values)
        with open(path, "a", encoding="utf-8") as file:
            row = {"name": name, "median": middle, "low": low, "high": high, "limit": limit}
            file.write(json.dumps(row) + "\n")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Find the median between the quartiles; one value is all three."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
