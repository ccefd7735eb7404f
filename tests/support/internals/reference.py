"""Names inside of `meshwright.reference`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.reference": "ReferenceRun, first_difference, record, train_reference",
    }
)
