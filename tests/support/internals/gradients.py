"""Names inside of `meshwright.gradients`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.gradients": "bits, norm",
    }
)
