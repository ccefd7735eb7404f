"""Names inside of `meshwright.reference`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.reference": "ReferenceRun, first_difference, record, train_reference",
    }
)
