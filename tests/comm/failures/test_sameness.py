"""The comparison of what all ranks must have alike."""

from __future__ import annotations

import pytest

from meshwright.errors import CollectiveMismatchError, PlanError
from meshwright.testing import FakeCommunicator, run_fake
from support.internals.comm import differing, first_difference, require_equal


def test_the_first_difference_of_lists_is_named_by_number() -> None:
    rows = [["w", [2, 3]], ["b", [3]]]
    assert first_difference((0, 4), [rows, rows]) is None
    found = first_difference((0, 4, 5), [rows, [rows[0], ["b", [4]]], rows])
    assert str(found) == 'number 1 is ["b", [3]] on ranks [0, 5]; ["b", [4]] on ranks [4]'
    assert str(first_difference((0, 4), [rows, rows[:1]])).endswith("nothing on ranks [4]")


def test_the_first_difference_of_mappings_is_named_by_dotted_key() -> None:
    one = {"axes": {"shard": 2, "lists": ["a", "b"]}, "seed": None}
    other = {"axes": {"shard": 2, "lists": ["a", "c"]}, "seed": None}
    found = first_difference((0, 1), [one, other])
    assert str(found) == 'axes.lists.1 is "b" on ranks [0]; "c" on ranks [1]'
    assert str(first_difference((0, 1), [one, {"axes": one["axes"]}])).startswith("seed is null")


def test_what_a_rank_does_not_know_can_be_left_out() -> None:
    found = first_difference((0, 1), [[1, None, 3], [1, 2, 4]], of_all=True)
    assert found is not None
    assert (found.place, found.sides) == (2, "ranks [0], others on ranks [1]")
    assert first_difference((0, 1), [[1, None], [1, 2, 3]], of_all=True) is None


def test_equal_rows_cost_one_gather_of_a_digest() -> None:
    def body(axis: FakeCommunicator) -> int:
        require_equal(axis, ["alike"] * 100, "words", label="words")
        return axis.control.counts[""]

    assert run_fake(3, body) == [1] * 3


@pytest.mark.parametrize("error", [CollectiveMismatchError, PlanError])
def test_every_rank_names_the_difference(error: type[Exception]) -> None:
    def body(axis: FakeCommunicator) -> str:
        with pytest.raises(error) as raised:
            require_equal(
                axis, {"seed": axis.rank // 2}, "the plan", label="plans", error=error, remedy="Do"
            )
        return str(raised.value)

    text = "expected the plan to be the same on ranks [0, 1, 2], but seed is 0 on ranks [0, 1]"
    for found in run_fake(3, body):
        assert f"{text}; 1 on ranks [2]. Do" in found


def test_rows_come_in_rank_order_where_they_differ() -> None:
    def body(axis: FakeCommunicator) -> list[int]:
        return differing(axis, axis.rank, label="numbers")

    assert run_fake(2, body) == [[0, 1]] * 2
