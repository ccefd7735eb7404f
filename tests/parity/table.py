"""The table of `docs/parity.md`, by ``PYTHONPATH=tests python -m parity.table > docs/parity.md``.

A name is shown by the file of tests that names it most; a file that the table has already stays
while it still names it, so that the table changes only where something has.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path

from parity.names import SUBJECTS, Row, Subject, rows
from parity.notes import ABSENT, BEHAVIOR, DIFFERENT

__all__ = ["BY_HAND", "PAGE", "ROOT", "note_of", "render"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
HEAD = """# Name by name beside torch

What torch 2.13 shows of its training wrappers, and what the same name is here. The names and
signatures are read from both by a script (`tests/parity`), and a test holds this page to them.
**Same**: the same signature, or one that a call of torch's fits. **Different** (in its signature,
or in what it does) and **absent** say why. The last column is the file of tests, under `tests/`,
that shows it. Below that, by hand: the texts of errors, behaviors, and defects of torch.
"""
BY_HAND = "\n## Texts of errors and warnings"
"""The beginning of the tables that are kept by hand, which `test_rows.py` holds to the tests."""


def render(before: str = "") -> str:
    """The whole page. ``before``, the page as it was, gives its choice of tests, and its end."""
    shown = dict(re.findall(r"^\| `([^`]+)` \|.*\| `?([^`|]*?)`? \|$", before, re.MULTILINE))
    parts = [HEAD]
    for subject in SUBJECTS:
        tests = _texts(subject)
        parts.append(
            f"\n## {subject.title}\n\n| name | here | how and why | shown by |\n|---|---|---|---|\n"
        )
        parts += [_line(row, tests, shown.get(row.name, "")) for row in rows(subject)]
    by_hand = before.partition(BY_HAND)
    return "".join(parts + list(by_hand[1:]))


def note_of(row: Row) -> str:
    """Return why ``row`` is not the same; empty where nothing is said."""
    notes = DIFFERENT if row.found else ABSENT
    for pattern, note in notes.items():
        if fnmatch.fnmatchcase(row.name, pattern):
            return note
    return ""


def _line(row: Row, tests: Mapping[str, str], before: str) -> str:
    test = _shown_by(row.name, tests, before)
    if not row.found:
        return f"| `{row.name}` | absent | {note_of(row)} | |\n"
    if row.name in BEHAVIOR:
        return f"| `{row.name}` | different | {BEHAVIOR[row.name]} | `{test}` |\n"
    if not row.differs:
        return f"| `{row.name}` | same | | `{test}` |\n"
    return f"| `{row.name}` | different | {row.differs}: {note_of(row)} | `{test}` |\n"


def _texts(subject: Subject) -> dict[str, str]:
    tests = ROOT / "tests"
    return {
        str(path.relative_to(tests)): path.read_text(encoding="utf-8")
        for folder in (*subject.tests, "parity")
        for path in sorted((tests / folder).rglob("test_*.py"))
    }


def _shown_by(name: str, tests: Mapping[str, str], before: str) -> str:
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    counts = {path: len(word.findall(text)) for path, text in tests.items()}
    if counts.get(before):
        return before
    best = max(counts, key=lambda path: counts[path])
    return best if counts[best] else ""


if __name__ == "__main__":
    print(render(PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""), end="")
