"""Of a test that is marked ``few(n)``, n cases are quick: the same in every run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = [f"tests/test_some.py::test_many[{letter}]" for letter in "abcdefgh"]


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, *marks: pytest.Mark, **values: object) -> None:
        self.nodeid = nodeid
        self.callspec = SimpleNamespace(params=values)
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks[decorator.mark.name] = decorator.mark


def quick(items: list[Item]) -> list[str]:
    """The tests that stay quick."""
    spec = importlib.util.spec_from_file_location(
        "conftest_here", Path(__file__).parent / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    conftest: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    conftest.pytest_collection_modifyitems(items)
    return sorted(item.nodeid for item in items if "slow" not in item.marks)


def many(names: list[str]) -> list[Item]:
    return [Item(name, pytest.mark.few(3).mark) for name in names]


def test_so_many_are_quick_as_it_says_and_they_are_the_same_in_any_order() -> None:
    drawn = quick(many(NAMES))
    assert len(drawn) == 3
    assert quick(many(NAMES[::-1])) == drawn
    assert quick([*many(NAMES), Item("tests/test_other.py::test_one")]) == sorted(
        [*drawn, "tests/test_other.py::test_one"]
    )


def test_those_that_are_quick_have_as_many_values_as_possible() -> None:
    pairs = [(number, letter) for number in range(4) for letter in "abcd"]
    items = [
        Item(f"tests/test_some.py::test[{n}-{x}]", pytest.mark.few(4).mark, number=n, letter=x)
        for n, x in pairs
    ]
    names = [name.partition("[")[2] for name in quick(items)]
    assert {name[0] for name in names} == set("0123")
    assert {name[2] for name in names} == set("abcd")


def test_cases_that_are_slow_by_themselves_are_not_drawn() -> None:
    drawn = quick(many(NAMES))
    slow = Item(drawn[0], pytest.mark.few(3).mark, pytest.mark.slow.mark)
    items = [slow, *many([name for name in NAMES if name != drawn[0]])]
    found = quick(items)
    assert len(found) == 3
    assert set(drawn[1:]) < set(found)


def test_of_the_others_so_many_are_slow_as_it_says_and_the_rest_soak() -> None:
    items = [Item(name, pytest.mark.few(2, slow=3).mark) for name in NAMES]
    drawn = quick(items)
    soak = {item.nodeid for item in items if "soak" in item.marks}
    assert (len(drawn), len(soak)) == (2, len(NAMES) - 5)
    assert soak.isdisjoint(drawn)


def test_where_it_does_not_say_four_of_the_others_are_slow() -> None:
    items = many(NAMES)
    assert len(quick(items)) == 3
    assert len([item for item in items if "soak" in item.marks]) == len(NAMES) - 3 - 4
