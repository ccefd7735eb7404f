"""Names inside of `meshwright.toml_text`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.toml_text": "Key, dotted, literal, parse, parse_key, write",
    }
)
