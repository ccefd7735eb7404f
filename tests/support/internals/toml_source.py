"""Names inside of `meshwright.toml_source`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.toml_source": (
            "adapter, dotted, dump, lines_of, literal, parse_key, plain, read, read_file, "
            "read_tree, review, write"
        ),
    }
)
