"""Names inside of `meshwright.randomness`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.randomness.counters": "random_bits",
    }
)
