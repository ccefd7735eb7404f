"""The table of `docs/models.md`, by ``PYTHONPATH=src:tests python -m parity.models``.

`test_hugging_face_models.py` runs every cell for which `lacks` has no reason.
"""

from __future__ import annotations

from parity.table import ROOT
from support.hugging_face import KINDS

__all__ = ["GENERATES", "PAGE", "TRAINS", "cells", "lacks", "table"]

PAGE = ROOT / "docs" / "models.md"
TRAINS = {
    "pipeline": "`pipeline()`",
    "plan, pipeline": "plan, `pipeline = 2`",
    "plan, tensor": "plan, `tensor = 2`",
    "fully_shard": "`fully_shard`",
}
"""Layouts that are trained, each with its title."""
GENERATES = {
    "replicate": "`replicate`",
    "DistributedDataParallel": "`DistributedDataParallel`",
    "fully_shard": "`fully_shard`",
    "FullyShardedDataParallel": "`FullyShardedDataParallel`",
    "summoned": "`summon_full_params`",
    "summoned, root alone": "`summon_full_params`, `recurse=False`",
    "plan, tensor": "plan, `tensor = 2`",
}
"""Wrappers under which `generate()` runs, each with its title."""
NO_RULES = (
    "There is no set of `[tensor]` rules for it; write a table of its modules and their styles "
    "instead."
)
NO_WORDS = "Its class has no `generate()`."
NOTES = (NO_RULES, NO_WORDS)


def lacks(name: str, column: str, *, generates: bool) -> str:
    """Say why a model has no cell in a column; empty where it has one."""
    kind = KINDS[name]
    if generates and not kind.writes:
        return NO_WORDS
    return NO_RULES if column == "plan, tensor" and not kind.rules else ""


def cells(*, generates: bool) -> list[tuple[str, str]]:
    """List model and column of all cells that are equal."""
    columns = GENERATES if generates else TRAINS
    every = ((name, column) for name in KINDS for column in columns)
    return [cell for cell in every if not lacks(*cell, generates=generates)]


def table() -> str:
    """Make the table, and the reasons below it."""
    kinds = [*["trained"] * len(TRAINS), *["`generate()`"] * len(GENERATES)]
    head = [["", *kinds], ["---"] * (1 + len(kinds))]
    rows = [["model", *TRAINS.values(), *GENERATES.values()], *([n, *_row(n)] for n in KINDS)]
    notes = (f"\n({number}) {note}\n" for number, note in enumerate(NOTES, start=1))
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows)) + "".join(notes)


def _row(name: str) -> list[str]:
    both = [(column, False) for column in TRAINS] + [(column, True) for column in GENERATES]
    return [_cell(name, column, lacks(name, column, generates=g)) for column, g in both]


def _cell(name: str, column: str, reason: str) -> str:
    if reason:
        return f"({NOTES.index(reason) + 1})"
    return f"equal, `{KINDS[name].rules}`" if column == "plan, tensor" else "equal"


if __name__ == "__main__":
    print(table(), end="")
