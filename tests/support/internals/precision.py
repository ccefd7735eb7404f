"""Names inside of `meshwright.precision`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.precision": "FloatName, Precision, dtype_bytes",
    }
)
