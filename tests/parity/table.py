"""The pages of parity, by ``PYTHONPATH=tests python -m parity.table``, which writes them.

`docs/parity_names.md` has a row for each name, `docs/parity.md` the counts of them. A name is shown
by the file of tests that names it most; a file that the table has already stays while it still
names it, so that the table changes only where something has.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from parity.names import SUBJECTS, Row, Subject, rows
from parity.notes import ABSENT, BEHAVIOR, DIFFERENT

__all__ = ["BEHAVIORS", "PAGE", "ROOT", "SUMMARY", "counts", "note_of", "render"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity_names.md"
SUMMARY = ROOT / "docs" / "parity.md"
BEHAVIORS = ROOT / "docs" / "parity_behaviors.md"
"""Tables that are kept by hand, which `test_rows.py` holds to the tests."""
HEAD = """# Parity, name by name

The public names of torch 2.13's training wrappers, and the same names in Meshwright.
[Parity with torch](parity.md) is the summary. A script (`tests/parity`) reads names and signatures
from both and generates this page; a test keeps it current.

**Same**: the signature is the same, or accepts every call that torch's accepts. **Different**: the
signature or the behavior differs; the third column says how. **Absent**: the third column says why.
The last column names a test file, under `tests/`, that covers the name.
"""


def render(before: str = "") -> str:
    """The page of names. ``before``, the page as it was, gives its choice of tests."""
    shown = dict(re.findall(r"^\| `([^`]+)` \|.*\| `?([^`|]*?)`? \|$", before, re.MULTILINE))
    parts = [HEAD]
    for subject in SUBJECTS:
        tests = _texts(subject)
        parts.append(
            f"\n## {subject.title}\n\n| name | here | how and why | shown by |\n|---|---|---|---|\n"
        )
        parts += [_line(row, tests, shown.get(row.name, "")) for row in rows(subject)]
    return "".join(parts)


def counts(page: str) -> str:
    """The table of `docs/parity.md`: how many names of ``page``, by heading, are the same."""
    lines = ["| Part | same | different | absent |", "|---|--:|--:|--:|"]
    for section in page.split("\n## ")[1:]:
        found = Counter(re.findall(r"^\| `[^`]+` \| (\w+) \|", section, re.MULTILINE))
        cells = (section.partition("\n")[0], found["same"], found["different"], found["absent"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


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
    made = render(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    PAGE.write_text(made, encoding="utf-8")
    summary = SUMMARY.read_text(encoding="utf-8")
    table = re.search(r"^\| Part .*?^(?!\|)", summary, re.MULTILINE | re.DOTALL)
    if table is not None:
        SUMMARY.write_text(summary.replace(table[0], counts(made)), encoding="utf-8")
