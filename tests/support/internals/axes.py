"""Names inside of `meshwright.axes`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.axes": "Axes, DATA_AXES, KNOWN_AXES, RESERVED_AXES",
    }
)
