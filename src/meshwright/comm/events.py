"""What a root does on this rank, one event after another, compared with the other ranks.

Forward and backward passes bring collectives with them, so that a rank which does one more, one
less or one of another kind would pair them with those of something else. A rank knows by itself
when it does what it has not done before::

    the two events before, and this one       known: go on, nothing is sent
                                              new, or another mode: ask the other ranks first
after a pass that raised                      ask, and go on only where every rank has issued as
                                              many collectives: what a rank left out, others wait in

Ranks ask through the board of `meshwright.comm.failure`, before any collective is issued: an answer
that differs is an error on the rank that asks, and the others read it while they wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from meshwright.comm import Communicator
from meshwright.comm.failure import Failure, FailureMonitor
from meshwright.comm.registry import PROCESS
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)

__all__ = ["Event", "EventCheck", "wait_for_all"]

FIRST_ROLL_CALL, NEXT_ROLL_CALL = 0.1, 1.0
"""Seconds until, and between, the questions to ranks that have not come."""

REMEMBERED = 8
"""Events that a rank can still be asked about."""

REMEDY = (
    "Every rank must run the same passes with the same settings: as many forward and backward "
    "passes, all in training or all in evaluation, all with or all without a reduction, with the "
    "same parameters frozen"
)

State = Mapping[str, list[Any]]
"""What decides a unit's collectives, by unit: settings first, then frozen parameters."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that all ranks do together."""

    text: str
    state: int = 0
    """A digest of the units' settings, where the event depends on them."""


class EventCheck:
    """The events of one root on this rank. ``state`` says what is set, unit by unit.

    ``axes`` are all communicators through which the root sends, in the same order on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        root: str,
        state: Callable[[], State],
        axes: Sequence[Communicator] = (),
    ) -> None:
        self._communicator = communicator
        self._rank = communicator.ranks[communicator.rank]
        self._root = root
        self._state = state
        self._axes = tuple(axes)
        self._number = 0
        self._tail: tuple[tuple[int, str, int, list[int]], ...] = ()
        self._last: tuple[Event | None, Event | None] = (None, None)
        self._known: set[tuple[Event | None, ...]] = set()
        self._said = ""
        """The key of what this rank has said last."""
        self._key = self._register()

    def is_new(self, event: Event) -> bool:
        """Whether ``event`` has not followed on the two events before it so far."""
        return (*self._last, event) not in self._known

    def happens(self, event: Event, *, asks: bool = False, after: str = "") -> None:
        """``event`` is next; call it before its first collective.

        ``after`` names the pass that raised on this rank just before, if one did or may have.

        Raises `CollectiveMismatchError` when another rank does something else, which is found out
        when it has not followed on the two events before it so far, or when it ``asks``; and when
        another rank waits for what this one left out.
        """
        monitor = PROCESS.monitor
        if monitor is None or self._communicator.size == 1:
            return
        self._count(event)
        turn = (*self._last, event)
        self._last = (self._last[1], event)
        if asks or after or turn not in self._known:
            self._ask(monitor, event, after)
            self._known.add(turn)

    def exchange(self, event: Event, said: str) -> list[str]:
        """What each rank says at ``event``, which is next, in rank order.

        For a few words now and then. It goes through the board, beside the collectives; a
        collective where no run is watched. ``event`` is no part of what follows on what.

        Raises `CollectiveMismatchError` when another rank does something else or has left,
        `RankFailedError` and `CollectiveTimeoutError` as a collective does.
        """
        monitor, ranks = PROCESS.monitor, self._communicator.ranks
        if monitor is None or self._communicator.size == 1:
            rows = self._communicator.gather_bytes(said.encode(), label=event.text)
            return [row.decode() for row in rows]
        self._count(event)
        keys = [f"{self._key}/{self._number}/said/{rank}" for rank in ranks]
        mine = keys[self._communicator.rank]
        monitor.board.set(mine, said)
        self._wait_until_said(monitor, event, keys)
        rows = [monitor.board.get(key).decode() for key in keys]
        if self._said:  # who is here has read what was said before
            monitor.board.delete_key(self._said)
        self._said = mine
        return rows

    def describe(self) -> Mapping[str, Any]:
        """Where this rank is, for peers that ask; called from the monitor's thread."""
        return {"tail": self._tail, "state": self._state(), "issued": self._issued()}

    # --------------------------------------------------------------------------- private

    def _register(self) -> str:
        monitor = PROCESS.monitor
        if monitor is None or self._communicator.size == 1:
            return ""
        number = monitor.board.add(f"events/{self._communicator.name}/{self._rank}", 1)
        key = f"events/{self._communicator.name}/{number}"
        monitor.describers[key] = self
        return key

    def _count(self, event: Event) -> None:
        self._number += 1
        here = (self._number, event.text, event.state, self._issued())
        self._tail = (*self._tail[1 - REMEMBERED :], here)

    def _issued(self) -> list[int]:
        """How many collectives this rank has issued on each axis."""
        return [axis.counts.get("", 0) for axis in self._axes]

    def _ask(self, monitor: FailureMonitor, event: Event, after: str) -> None:
        number = self._number
        votes = f"{self._key}/{number}/{event.text}/{event.state}"
        if after:
            votes += f"/{self._tail[-1][-1]}"

        def have_come() -> bool:
            return self._have_come(monitor, number, event, after, monitor.roll_call())

        wait_for_all(monitor, self._communicator, votes, have_come)

    def _wait_until_said(self, monitor: FailureMonitor, event: Event, keys: list[str]) -> None:
        """Wait for ``keys`` as long as for a collective: ranks may compile, or take their time."""
        number, pause, bound = self._number, 0.0002, self._communicator.timeout
        now = time.monotonic()
        next_roll_call, give_up = now + FIRST_ROLL_CALL, now + bound
        while not monitor.board.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            monitor.check()
            now = time.monotonic()
            if now < min(next_roll_call, give_up):
                continue
            answers = monitor.roll_call()
            self._have_come(monitor, number, event, "", answers)
            missing = [
                r
                for r, key in zip(self._communicator.ranks, keys, strict=True)
                if not monitor.board.check([key])
            ]
            states = [answers.get(rank, {}) for rank in missing]
            gone = [r for r in missing if r not in answers and monitor.has_ended(r)]
            left = [r for r, s in zip(missing, states, strict=True) if s.get("leaving")]
            if any(state.get("compiling") or state.get("excused") for state in states):
                give_up = time.monotonic() + bound
            if missing and (gone or left or time.monotonic() > give_up):
                self._give_up(monitor, event, gone, left, missing)
            next_roll_call = time.monotonic() + NEXT_ROLL_CALL

    def _give_up(
        self,
        monitor: FailureMonitor,
        event: Event,
        gone: list[int],
        left: list[int],
        missing: list[int],
    ) -> NoReturn:
        where = f"where rank {self._rank} is at {event.text} of {self._root}"
        if gone:
            text = f"its process has ended, {where}"
            monitor.post_failure(
                Failure(rank=gone[0], by=self._rank, phase="", operation="", error=text, line="")
            )
            raise RankFailedError(f"rank {gone[0]} failed first: {text}", gone[0])
        error: CommunicationError
        if left:
            error = CollectiveMismatchError(f"ranks {left} leave the run, {where}. {REMEDY}")
        else:
            error = CollectiveTimeoutError(
                f"ranks {missing} have not come within {self._communicator.timeout:.0f} s, {where}"
            )
        monitor.publish(error, is_cause=True)
        raise error

    def _have_come(
        self,
        monitor: FailureMonitor,
        number: int,
        event: Event,
        after: str,
        answers: Mapping[int, Mapping[str, Any]],
    ) -> bool:
        """Whether there is nobody left to wait for. Raises when a rank does something else."""
        is_complete = True
        for rank in self._communicator.ranks:
            if rank == self._rank:
                continue
            if rank not in answers or answers[rank].get("leaving"):
                return True  # the wait for the collective names it
            theirs = answers[rank]["described"].get(self._key)
            if theirs is None:
                is_complete = False
                continue
            tail = {at: (text, state) for at, text, state, _ in theirs["tail"]}
            if after:
                issued = next((n for at, *_, n in theirs["tail"] if at == number), theirs["issued"])
                self._compare_issued(monitor, issued, rank, after)
            if not tail or max(tail) < number:
                is_complete = False
            elif tail.get(number, (event.text, event.state)) != (event.text, event.state):
                self._fail(monitor, event, rank, tail[number][0], theirs["state"])
        return is_complete

    def _compare_issued(
        self, monitor: FailureMonitor, theirs: Sequence[int], rank: int, after: str
    ) -> None:
        """Raise where ``rank`` has issued what this rank left out when it raised."""
        mine = self._tail[-1][-1]
        for axis, here, there in zip(self._axes, mine, theirs, strict=True):
            if there > here:
                error = CollectiveMismatchError(
                    f"rank {self._rank} raised in {after} of {self._root}, after {here} "
                    f"collectives on axis {axis.axis}, and goes on, while rank {rank} has issued "
                    f"{there}: they would be mixed up with those of another pass. Let all ranks "
                    "give up a pass together, before its first collective, or end the run"
                )
                monitor.publish(error, is_cause=True)
                raise error

    def _fail(
        self, monitor: FailureMonitor, event: Event, rank: int, other: str, state: State
    ) -> NoReturn:
        if other != event.text:
            found = f"{event.text} on rank {self._rank}, {other} on rank {rank}"
        else:
            difference = _first_difference(self._state(), state, self._rank, rank)
            found = f"{event.text} with {difference}"
        error = CollectiveMismatchError(
            f"What the ranks do with {self._root} differs, at number {self._number}: {found}. "
            f"Nothing of it has been sent. {REMEDY}"
        )
        monitor.publish(error, is_cause=True)
        raise error


def wait_for_all(
    monitor: FailureMonitor,
    communicator: Communicator,
    votes: str,
    have_come: Callable[[], bool],
) -> bool:
    """Vote for ``votes`` and wait until every rank has; False at the communicator's timeout.

    Ranks that do not vote are asked by ``have_come``, which tells whether nobody is to come any
    more, or raises. This wait keeps nobody from coming: what others need of this rank has been
    issued.
    """
    arrived = monitor.board.add(votes, 1)
    begun = time.monotonic()
    next_roll_call = begun + FIRST_ROLL_CALL
    pause = 0.0002
    while arrived < communicator.size:
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
        monitor.check()
        now = time.monotonic()
        if now > next_roll_call:
            if have_come():
                return True
            next_roll_call = time.monotonic() + NEXT_ROLL_CALL
        if now > begun + communicator.timeout:
            return False
        arrived = monitor.board.add(votes, 0)
    return True


def _first_difference(mine: State, theirs: State, rank: int, other: int) -> str:
    for name in [*mine, *theirs]:
        here, there = mine.get(name), theirs.get(name)
        if here != there:
            for ours, others in zip(here or ["nothing"], there or ["nothing"], strict=False):
                if ours != others:
                    return f"unit {name!r} set to {ours} on rank {rank}, {others} on rank {other}"
            return f"unit {name!r} set to {here} on rank {rank}, {there} on rank {other}"
    return f"settings of rank {rank} and rank {other} that differed for a while"
