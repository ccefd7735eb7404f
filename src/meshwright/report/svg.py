"""Pieces of drawings: texts, round numbers along an axis, formatted numbers."""

from __future__ import annotations

import html
import math


def text(x: float, y: float, words: str, anchor: str, kind: str) -> str:
    """Write a ``<text>`` element of CSS class ``kind``."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{html.escape(words)}</text>"


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """List about ``count`` round numbers from ``low`` to ``high``: 1, 2, 5 times a power of 10."""
    apart = (high - low) / count
    if not apart > 0:
        return []
    size = 10.0 ** math.floor(math.log10(apart))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= apart * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def seconds(value: float) -> str:
    """Write a time in a unit that fits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} µs" if value else "0"


def short(value: float) -> str:
    """Write a number in few characters: ``1.5k``, ``32M``, ``0.003``."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
