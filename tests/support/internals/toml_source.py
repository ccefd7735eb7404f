"""Names inside of `meshwright.toml_source`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.toml_source": "dump, plain, read, read_file, read_tree, review",
    }
)
