"""The table of models' own plans in `docs/models.md`, and the script that trains every folder.

``PYTHONPATH=src:tests python -m parity.model_plans`` prints the table of `RESULTS`. With
``--train`` it trains the folders that `RESULTS` has nothing of, a few at a time, and writes each
there, so that it can be ended and go on at any time; names of folders train those (again).
``--axes pipeline`` trains in two stages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.testing import RanksFailed, ranks
from parity.table import ROOT
from support.model_plans import LOOSE, folders, import_classes, outcomes

__all__ = ["PAGE", "found", "outcomes_of", "results", "table"]

PAGE = ROOT / "docs" / "models.md"
RESULTS = Path(__file__).with_name("model_plans.json")
"""By axis and folder: empty where it trains as one process, else what differs or is refused."""
AT_ONCE, COLUMNS = 4, 4
"""Folders that the same ranks train one after the other; columns of the table."""


def results(axis: str) -> dict[str, str]:
    """Return what was found at ``axis = 2``, by folder."""
    known: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8"))[axis]
    return known


def short(outcome: str) -> str:
    """The first problem of an outcome, without its numbers and ranks."""
    first = re.split(r" \(rank \d|; found|\. Where|\n", outcome)[0]
    return re.sub(r" by [0-9.e+-]+ of its norm on the example", "", first)


def found(folder: str, outcome: str, axis: str = "tensor") -> bool:
    """Whether ``outcome`` of a training is what `RESULTS` say."""
    known = results(axis).get(folder, "")
    if not known or known.startswith("refused"):
        return short(outcome) == known
    differs = re.search(r"by ([0-9.e+-]+) relative", outcome)
    return not outcome or (differs is not None and float(differs[1]) <= LOOSE)


def table() -> str:
    """Make the table, and the reasons below it."""
    known, staged = results("tensor"), results("pipeline")
    refused = [text.removeprefix("refused: ") for text in known.values() if text[:7] == "refused"]
    reasons = [*dict.fromkeys(refused)]

    def cell(folder: str) -> str:
        text = known[folder]
        if text.startswith("refused"):
            return f"`{folder}` refused ({reasons.index(text.removeprefix('refused: ')) + 1})"
        loose = f" {LOOSE:.0e}" if text else ""
        return f"`{folder}`{loose}{', stages' if staged.get(folder) == '' else ''}"

    cells = [cell(folder) for folder in sorted(known)]
    cells += [""] * (-len(cells) % COLUMNS)
    rows = [cells[at : at + COLUMNS] for at in range(0, len(cells), COLUMNS)]
    head = [["folder"] * COLUMNS, ["---"] * COLUMNS]
    notes = (f"\n({number}) `{reason}`\n" for number, reason in enumerate(reasons, start=1))
    counts = (
        f"\n{len(known) - len(refused)} train as one process does, {len(refused)} are refused:\n"
    )
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows)) + counts + "".join(notes)


def train(names: Sequence[str], axis: str) -> int:
    """Train ``names``, or all without a result; the number of those that raised."""
    left, raised = list(names) or [n for n in folders() if n not in results(axis)], 0
    while left:
        few, left = left[:AT_ONCE], left[AT_ONCE:]
        done = json.loads(RESULTS.read_text(encoding="utf-8"))
        for name, outcome in outcomes_of(few, {axis: 2}).items():
            print(f"{name}: {outcome or 'equal'}", flush=True)
            if outcome.startswith("raised"):
                raised += 1
            else:
                done[axis][name] = short(outcome)
        RESULTS.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return raised


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
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--axes", default="tensor", choices=("tensor", "pipeline"))
    options = parser.parse_args()
    if not options.train:
        print(table(), end="")
        return 0
    return int(train(options.names, options.axes) > 0)


if __name__ == "__main__":
    sys.exit(main())
