"""Names inside of `meshwright.randomness`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.randomness.counters": "random_bits",
    }
)
