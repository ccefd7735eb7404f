"""Names inside of `meshwright.settings`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.settings": (
            "Above, AtLeast, Inline, Key, Origin, Problem, keys_of, nearest, split_overrides"
        ),
    }
)
