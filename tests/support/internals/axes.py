"""Names inside of `meshwright.axes`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.axes": "Axes, DATA_AXES, KNOWN_AXES, SUM_AXES",
    }
)
