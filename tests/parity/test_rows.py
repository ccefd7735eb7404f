"""The tables of `docs/parity_behaviors.md`: their tests exist and say those texts."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from parity.table import BEHAVIORS, ROOT

ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in BEHAVIORS.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.endswith("| shown by |")
]
TESTS = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def read(file: str) -> tuple[str, frozenset[str]]:
    """A test file as one line without the seams of strings, and the names of its functions."""
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    names = frozenset(n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    seamless = re.sub(r'"\s*\n\s*f?r?"', "", text).replace("\\", "")
    return re.sub(r"\s+", " ", seamless), names


def kinds(name: str) -> set[str]:
    """``name`` and the names of what derives from it: errors of Python and of ours."""

    def below(of: type[BaseException]) -> set[str]:
        return {of.__name__}.union(*map(below, of.__subclasses__()))

    found = [kind for kind in _all_errors(BaseException) if kind.__name__ == name]
    return {name}.union(*map(below, found))


def _all_errors(of: type[BaseException]) -> list[type[BaseException]]:
    return [of, *(kind for sub in of.__subclasses__() for kind in _all_errors(sub))]


def test_there_are_rows() -> None:
    assert len(ROWS) > 250


@pytest.mark.parametrize(
    "file", sorted({file for row in ROWS for file, _ in TESTS.findall(row[-1])})
)
def test_rows_name_tests_that_exist(file: str) -> None:
    named = {name for row in ROWS for of, name in TESTS.findall(row[-1]) if of == file}
    assert named - read(file)[1] == set()


def test_every_row_names_a_test() -> None:
    assert [row for row in ROWS if not TESTS.findall(row[-1])] == []


def test_texts_are_in_the_tests_that_show_them() -> None:
    absent = []
    for said, kind, shown_by in (row for row in ROWS if len(row) == 3):
        text = said.replace("\\|", "|").strip("`").strip() if said[:2] == "``" else said[1:-1]
        ((file, _),) = TESTS.findall(shown_by)
        if text.replace("\\|", "|") not in read(file)[0]:
            absent.append(said)
        if kind and not any(name in read(file)[0] for name in kinds(kind.strip("`"))):
            absent.append((said, kind))
    assert absent == []
