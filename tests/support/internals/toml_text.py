"""Names inside of `meshwright.toml_text`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.toml_text": "Key, dotted, literal, parse, parse_key, write",
    }
)
