"""Simulated time: one rank runs at a time, until it pauses or waits; then the next that is due."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from support.internals.comm import KeyWait, SystemClock, Worker

T = TypeVar("T")

Turn = threading.Lock
"""A lock that a thread waits for until it is its turn."""

_STACK = 512 * 1024
"""Bytes of the stack of a rank's thread: there are thousands."""

_GOLDEN = 0.618034
"""Spreads the looks of the ranks' boards over the time between two, as chance does."""


class SimulatedClock(SystemClock):
    """Time that passes only while every rank pauses or waits."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], Turn | None]]] = []
        self._numbers = itertools.count()
        self._turns: dict[int, Turn] = {}
        """The turn of each thread."""
        self._error: BaseException | None = None

    def now(self) -> float:
        """Return the simulated seconds since the beginning."""
        return self._now

    wall = now

    def at(self, when: float, act: Callable[[], Turn | None]) -> None:
        """Call ``act`` at the time ``when``; it may say whose turn it is then."""
        heapq.heappush(self._due, (max(when, self._now), next(self._numbers), act))

    def sleep(self, seconds: float) -> None:
        """Give the others the turn until ``seconds`` have passed."""
        self._pause(self._now + seconds)

    def worker(self, look: Callable[[], object], every: float) -> Worker:
        """Do what is given at once, and ``look`` every so many seconds."""
        return _Inline(self, look, every, self._now + every * (next(self._numbers) * _GOLDEN % 1))

    def arrival(self, store: Any, key: str, done: Callable[[], None]) -> KeyWait:
        """Begin to wait for ``key`` of a `CountingStore`."""
        found = _Awaited(self)
        store.tell(key, found.ring)
        done()
        return found

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of ``bodies`` in a thread of its own; returns what they return."""
        values: dict[int, T] = {}
        end = _turn()
        before = threading.stack_size(_STACK)

        def main(number: int, turn: Turn) -> None:
            turn.acquire()
            self._turns[threading.get_ident()] = turn
            try:
                values[number] = bodies[number]()
            except BaseException as error:
                self._error = error
            (end if self._error or len(values) == len(bodies) else self._next()).release()

        for number in range(len(bodies)):
            turn = _turn()
            self.at(0.0, functools.partial(_itself, turn))
            start_new_thread(main, (number, turn))
        threading.stack_size(before)
        self._next().release()
        end.acquire()
        if self._error is not None:
            raise self._error
        return [values[number] for number in range(len(bodies))]

    # ------------------------------------------------------------------------ turns

    def _next(self) -> Turn:
        """Go on in time to the next turn of a rank, by way of what comes before."""
        while True:
            self._now, _, act = heapq.heappop(self._due)
            turn = act()
            if turn is not None:
                return turn

    def _pause(self, until: float, bell: _Awaited | None = None) -> None:
        """Give the turn away, to have it again at ``until`` or when ``bell`` rings."""
        mine, is_due = self._turns[threading.get_ident()], True

        def wake() -> Turn | None:
            nonlocal is_due
            was_due, is_due = is_due, False
            return mine if was_due else None

        self.at(until, wake)
        if bell is not None:
            bell.wakes(lambda: self.at(self._now, wake))
        turn = self._next()
        if turn is not mine:
            turn.release()
            mine.acquire()


def _turn() -> Turn:
    """Make a turn that nobody has yet."""
    turn = threading.Lock()
    turn.acquire()
    return turn


def _itself(turn: Turn) -> Turn:
    return turn


class _Inline:
    """The requests of a rank, made in its own turn."""

    def __init__(
        self, clock: SimulatedClock, look: Callable[[], object], every: float, first: float
    ) -> None:
        self._clock, self._look, self._every = clock, look, every
        self._has_stopped = False
        clock.at(first, self._again)

    def run(self, work: Callable[[], T], refuse: Callable[[], None]) -> T:
        return work()

    def later(self, work: Callable[[], object]) -> None:
        work()

    def stop(self, seconds: float) -> None:
        self._has_stopped = True

    def _again(self) -> None:
        if not self._has_stopped:
            self._look()
            self._clock.at(self._clock.now() + self._every, self._again)


class _Awaited:
    """A key that a rank waits for."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.has_come = False
        """True when the key is there."""
        self._is_nudged = False
        self._wake: Callable[[], None] = lambda: None

    def ring(self) -> None:
        """Take in that the key is there."""
        self.has_come = True
        self._wake()

    def nudge(self) -> None:
        self._is_nudged = True
        self._wake()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when there is something to look at."""
        self._wake = wake

    def wait(self, seconds: float) -> bool:
        if not self.has_come and not self._is_nudged:
            self._clock._pause(self._clock.now() + seconds, self)
        self._is_nudged = False
        return self.has_come
