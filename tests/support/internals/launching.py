"""Names inside of `meshwright.launching`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.launching": "modules",
        "meshwright.launching.pool": "shared_pool",
    }
)
