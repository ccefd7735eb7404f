"""Control messages of threads: read in order, at any length, kept until they are accepted."""

from __future__ import annotations

from typing import Any

from meshwright.testing import FakeCommunicator, run_fake
from support.internals.pipelining import ROOM, ControlMessages

LONG = {"text": "a" * (3 * ROOM)}


def nothing() -> None:
    pass


def body_order(world: FakeCommunicator) -> list[Any]:
    """Long ones and short ones, several awaited at a time, the last read first."""
    messages = ControlMessages(world, 3)
    written: list[dict[str, Any]] = [{"number": 0}, LONG, {"number": float("inf")}, LONG, {}]
    sent = [
        each for contents in written for each in messages.send(contents, 1 - world.rank, "some")
    ]
    expected = [messages.expect(1 - world.rank, "some") for _ in written]
    found = [messages.read(message, nothing) for message in reversed(expected)]
    for pending, _ in sent:
        pending.wait()
    assert all(message.has_come for message in expected)
    assert found[::-1] == written
    return [issued.label for issued in world.control.issued]


def test_messages_are_read_in_order() -> None:
    for labels in run_fake(2, body_order):
        assert labels.count("some") == 10
        assert labels.count("rest: some") == 4


def body_kept(world: FakeCommunicator) -> None:
    """A message that a step has read and not accepted is the next step's."""
    messages = ControlMessages(world, 0)
    sent = [
        each for number in range(2) for each in messages.send({"n": number}, 1 - world.rank, "")
    ]
    peer = 1 - world.rank
    first = messages.awaited(peer, "first")
    assert messages.read(first, nothing) == {"n": 0}
    assert messages.awaited(peer, "again") is first
    messages.accept(first)
    second = messages.awaited(peer, "second")
    assert messages.read(second, nothing) == {"n": 1}
    messages.accept(second)
    for pending, _ in sent:
        pending.wait()


def test_a_message_is_kept_until_it_is_accepted() -> None:
    run_fake(2, body_kept)
