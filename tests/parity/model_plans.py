"""The table of models' own plans in `docs/models.md`, and the script that trains every folder.

``PYTHONPATH=src:tests python -m parity.model_plans`` prints the table. With ``--train FILE`` it
trains the folders that FILE, in JSON, has no result of, a few at a time, and writes each there;
``--axes pipeline`` trains in two stages; names of folders train those again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.testing import RanksFailed, ranks
from parity.table import ROOT
from support.model_plans import CLOSE, folders, import_classes, outcomes

__all__ = ["PAGE", "REFUSED", "STAGED", "TOLERANCE", "found", "outcomes_of", "table"]

PAGE = ROOT / "docs" / "models.md"
AT_ONCE = 4
"""Folders that the same ranks train one after the other."""

REFUSED: Mapping[str, str] = {}
"""Folders whose plan is refused at ``tensor = 2``, and a part of the error."""

TOLERANCE: Mapping[str, float] = {}
"""Folders that are equal to less than `CLOSE`."""

STAGED: tuple[str, ...] = ()
"""Folders that are also trained in two stages, by the pipeline plan that they carry."""

COLUMNS = 4


def found(folder: str, outcome: str) -> bool:
    """Whether ``outcome`` of a training is what the table says."""
    if folder in REFUSED:
        return outcome.startswith("refused: ") and REFUSED[folder] in outcome
    differs = re.search(r"by ([0-9.e+-]+) relative", outcome)
    within = differs is not None and float(differs[1]) <= TOLERANCE.get(folder, CLOSE)
    return not outcome or within


def table() -> str:
    """Make the table, and the reasons below it."""
    names, reasons = folders(), list(dict.fromkeys(REFUSED.values()))

    def cell(folder: str) -> str:
        if folder in REFUSED:
            return f"`{folder}` refused ({reasons.index(REFUSED[folder]) + 1})"
        loose = f" {TOLERANCE[folder]:.0e}" if folder in TOLERANCE else ""
        return f"`{folder}`{loose}{', stages' if folder in STAGED else ''}"

    cells = [cell(folder) for folder in names]
    cells += [""] * (-len(cells) % COLUMNS)
    rows = [cells[at : at + COLUMNS] for at in range(0, len(cells), COLUMNS)]
    head = [["folder"] * COLUMNS, ["---"] * COLUMNS]
    notes = (f"\n({number}) `{reason}`\n" for number, reason in enumerate(reasons, start=1))
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows)) + "".join(notes)


def train(path: Path, names: Sequence[str], axes: dict[str, int]) -> int:
    """Train ``names``, or all without a result; the number of results the table does not say."""
    done: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    left = list(names) or [name for name in folders() if name not in done]
    while left:
        few, left = left[:AT_ONCE], left[AT_ONCE:]
        for name, outcome in outcomes_of(few, axes).items():
            done[name] = outcome
            print(f"{name}: {outcome or 'equal'}", flush=True)
        path.write_text(json.dumps(done, indent=1))
    return sum(not found(name, outcome) for name, outcome in done.items())


def outcomes_of(names: Sequence[str], axes: dict[str, int]) -> dict[str, str]:
    """Train ``names``; where ranks fail, each by itself, so that the one that raises is known."""
    found: dict[str, str] = {}
    while left := [name for name in names if name not in found]:
        try:
            for name in left:
                import_classes(name)
            first, second = ranks(2, outcomes, left, axes, timeout=120 + 30 * len(left))
        except RanksFailed as error:
            if len(left) == 1:
                return {**found, left[0]: f"raised: {error}"}
            return found | {n: t for each in left for n, t in outcomes_of([each], axes).items()}
        found |= {name: text or second[name] for name, text in first.items()}
    return found


def main() -> int:
    """Print the table, or train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--axes", default="tensor")
    options = parser.parse_args()
    if options.train is None:
        print(table(), end="")
        return 0
    return int(train(options.train, options.names, {options.axes: 2}) > 0)


if __name__ == "__main__":
    sys.exit(main())
