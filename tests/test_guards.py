"""The table of guards is true: each row's places and test exist, and guards are a bounded share."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "meshwright"
COLUMNS = {"name", "promise", "class", "place", "step", "test"}
CLASSES = {"A", "B", "C", "D"}

SHARE, LINES = 0.15, 10086
"""The most share of guards in the lines of `src`, and their lines. Each reduction lowers these."""

GUARDS: list[dict[str, Any]] = tomllib.loads((TESTS / "guards.toml").read_text("utf-8"))["guard"]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def length(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def definitions(tree: ast.AST) -> Iterator[Definition]:
    """What is defined in the body of ``tree``, also in branches of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node)


def lines_of(place: str) -> set[tuple[str, int]]:
    """The lines of ``place``, decorators too; none where there is no such place."""
    path, _, dotted = place.partition(":")
    if not (SOURCE / path).is_file():
        return set()
    if not dotted:
        return {(path, line + 1) for line in range(length(SOURCE / path))}
    found: list[Any] = [tree(SOURCE / path)]
    for name in dotted.split("."):
        found = [each for outer in found for each in definitions(outer) if each.name == name]
    lines: set[tuple[str, int]] = set()
    for node in found:  # a property and its setter are two of one name
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        lines |= {(path, line) for line in range(first, node.end_lineno + 1)}
    return lines


def lines_of_all(guards: Iterable[dict[str, Any]]) -> set[tuple[str, int]]:
    return {line for guard in guards for place in guard["place"] for line in lines_of(place)}


def room_of(guard: dict[str, Any]) -> str:
    return guard["place"][0].partition(":")[0].partition("/")[0].removesuffix(".py")


def has_test(guard: dict[str, Any]) -> bool:
    path, _, name = guard["test"].partition("::")
    if not name.startswith("test_") or not path.startswith("tests/") or not (ROOT / path).is_file():
        return False
    return name in {each.name for each in definitions(tree(ROOT / path))}


def test_rows_are_filled_in() -> None:
    columns = [guard["name"] for guard in GUARDS if guard.keys() != COLUMNS]
    assert columns == []
    assert [guard["name"] for guard in GUARDS if not all(guard.values())] == []
    assert [guard["name"] for guard in GUARDS if guard["class"] not in CLASSES] == []
    assert [guard["name"] for guard in GUARDS if not guard["promise"].endswith(".")] == []


def test_places_exist() -> None:
    places = [(guard["name"], place) for guard in GUARDS for place in guard["place"]]
    assert [row for row in places if not lines_of(row[1])] == []


def test_tests_exist() -> None:
    assert [(guard["name"], guard["test"]) for guard in GUARDS if not has_test(guard)] == []


def test_names_are_unique() -> None:
    names = [guard["name"] for guard in GUARDS]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_rows_are_sorted_by_room_and_name() -> None:
    rows = [(room_of(guard), guard["name"].lower()) for guard in GUARDS]
    assert rows == sorted(rows)


def test_guards_are_a_bounded_share_of_the_source() -> None:
    total = sum(length(path) for path in SOURCE.rglob("*.py"))
    lines = len(lines_of_all(GUARDS))
    share = lines / total
    assert share <= SHARE, f"guards have {lines} lines of {total}, which is {share:.2%}"
    assert lines <= LINES


def test_what_does_not_exist_has_no_lines() -> None:
    for place in ("nowhere.py", "errors.py:Nothing", "errors.py:PlanError.nothing"):
        assert lines_of(place) == set()
    assert not has_test({"test": "tests/test_guards.py::test_nothing"})
    assert not has_test({"test": "tests/nowhere.py::test_nothing"})


def test_a_line_counts_once() -> None:
    method, whole = "errors.py:PlanError.__init__", "errors.py:PlanError"
    assert lines_of(method) < lines_of(whole) < lines_of("errors.py")
    both = [{"place": [whole, method]}, {"place": [whole]}]
    assert lines_of_all(both) == lines_of(whole)
