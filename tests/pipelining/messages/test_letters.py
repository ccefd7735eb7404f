"""Letters between threads: read in order, whatever their length, kept until they are accepted."""

from __future__ import annotations

from typing import Any

from meshwright.testing import FakeCommunicator, run_fake
from support.internals.pipelining import ROOM, Letters

LONG = {"text": "a" * (3 * ROOM)}


def nothing() -> None:
    pass


def body_order(world: FakeCommunicator) -> list[Any]:
    """Long ones and short ones, several awaited at a time, the last read first."""
    letters = Letters(world, 3)
    written: list[dict[str, Any]] = [{"number": 0}, LONG, {"number": float("inf")}, LONG, {}]
    sent = [each for contents in written for each in letters.send(contents, 1 - world.rank, "some")]
    expected = [letters.expect(1 - world.rank, "some") for _ in written]
    found = [letters.read(letter, nothing) for letter in reversed(expected)]
    for pending, _ in sent:
        pending.wait()
    assert all(letter.has_come for letter in expected)
    assert found[::-1] == written
    return [issued.label for issued in world.control.issued]


def test_letters_are_read_in_order() -> None:
    for labels in run_fake(2, body_order):
        assert labels.count("some") == 10
        assert labels.count("rest: some") == 4


def body_kept(world: FakeCommunicator) -> None:
    """A letter that a step has read and not accepted is the next step's."""
    letters = Letters(world, 0)
    sent = [each for number in range(2) for each in letters.send({"n": number}, 1 - world.rank, "")]
    peer = 1 - world.rank
    first = letters.awaited(peer, "first")
    assert letters.read(first, nothing) == {"n": 0}
    assert letters.awaited(peer, "again") is first
    letters.accept(first)
    second = letters.awaited(peer, "second")
    assert letters.read(second, nothing) == {"n": 1}
    letters.accept(second)
    for pending, _ in sent:
        pending.wait()


def test_a_letter_is_kept_until_it_is_accepted() -> None:
    run_fake(2, body_kept)
