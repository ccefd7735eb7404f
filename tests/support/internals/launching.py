"""Names inside of `meshwright.launching`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.launching.pool": "shared_pool",
    }
)
