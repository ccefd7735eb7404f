"""Names inside of `meshwright.cli`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.cli.commands": "COMMANDS, command",
        "meshwright.cli.train": "planned",
        "meshwright.cli.words": "parse",
    }
)
