"""Names inside of `meshwright.precision`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.precision": "FloatName, Precision, dtype_bytes",
    }
)
