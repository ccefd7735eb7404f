"""The house holds its rules, and each rule turns red when it is broken."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from support.architecture import table
from support.architecture.planted import PLANTED, SOUND, long_function
from support.architecture.rules import RULES, all_of, broken
from support.architecture.source import Tree

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"


@pytest.fixture(scope="module")
def house() -> Tree:
    return Tree(SOURCE)


def _plant(root: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text), encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_holds_the_rule(house: Tree, rule: str) -> None:
    violations = broken(rule, house)
    assert not violations, "\n".join([RULES[rule].__doc__ or "", *map(str, violations)])


def test_the_house_is_found(house: Tree) -> None:
    assert {"meshwright", "meshwright.errors", "meshwright.mesh"} <= house.modules.keys()


def test_the_documentation_names_every_room(house: Tree) -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {source.room for source in house.sources if source.room}
    assert {room for room in rooms if f"`{room}`" not in text} == set()


def test_every_folder_of_the_source_has_its_folder_of_tests() -> None:
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")}
    tests = SOURCE.parents[1] / "tests"
    assert {
        str(folder) for folder in folders if not list((tests / folder).rglob("test_*.py"))
    } == set()


@pytest.mark.parametrize(
    ("rule", "path", "files"), PLANTED, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(PLANTED)]
)
def test_a_planted_violation_is_seen(
    tmp_path: Path, rule: str, path: str, files: dict[str, str]
) -> None:
    violations = broken(rule, _plant(tmp_path, files))
    assert path in {violation.path for violation in violations}
    assert str(violations[0]).startswith(f"{violations[0].path}:{violations[0].line}: [{rule}] ")


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in PLANTED} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_sound_code_is_left_alone(tmp_path: Path, rule: str) -> None:
    assert broken(rule, _plant(tmp_path, SOUND)) == []


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    long_text = {"plan.py": long_function(table.FUNCTION_LINES, docstring=40)}
    assert broken("function_size", _plant(tmp_path, long_text)) == []


def test_tests_import_what_is_in_no_list_through_one_door(house: Tree) -> None:
    lists = {each.module: names for each in house.sources if (names := all_of(each)) is not None}
    lists["meshwright.errors"] = lists["meshwright"]
    tests = SOURCE.parents[1] / "tests"
    others = [
        f"{path.relative_to(tests)}:{node.lineno}: {node.module}.{alias.name}"
        for path in sorted(tests.rglob("*.py"))
        if path.parent.name != "internals"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright")
        for alias in node.names
        if alias.name not in lists.get(node.module or "", ())
        and f"{node.module}.{alias.name}" not in lists
    ]
    assert others == [], "give each a row in tests/support/internals"
