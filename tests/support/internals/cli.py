"""Names inside of `meshwright.cli`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.cli.commands": "COMMANDS, command",
        "meshwright.cli.words": "parse",
    }
)
