"""Names inside of `meshwright.settings`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.settings": (
            "Above, AtLeast, Inline, Origin, Problem, keys_of, nearest, split_overrides"
        ),
    }
)
