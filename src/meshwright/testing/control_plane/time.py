"""Simulated time: one rank runs at a time, until it pauses or waits; then the next that is due."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshwright.comm.failures.clock import Arrival, Clock, Worker

T = TypeVar("T")

_STACK = 512 * 1024
"""Bytes of the stack of a rank's thread: there are thousands."""

_GOLDEN = 0.618034
"""Spreads the looks of the ranks' boards over the time between two, as chance does."""


class SimulatedClock(Clock):
    """Time that passes only while every rank pauses or waits."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._gates: dict[int, threading.Lock] = {}

    def now(self) -> float:
        """Return the simulated seconds since the beginning."""
        return self._now

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call ``act`` at the time ``when``, between the turns of the ranks."""
        heapq.heappush(self._due, (max(when, self._now), next(self._numbers), act))

    def sleep(self, seconds: float) -> None:
        """Give the others the turn until ``seconds`` have passed."""
        self._pause(self._now + seconds)

    def worker(self, look: Callable[[], object], every: float) -> Worker:
        """Do what is given at once, and ``look`` every so many seconds."""
        return _Inline(self, look, every, self._now + every * (next(self._numbers) * _GOLDEN % 1))

    def arrival(self, store: Any, key: str, done: Callable[[], None]) -> Arrival:  # noqa: ANN401
        """Begin to wait for ``key`` of a `CountingStore`."""
        found = _Awaited(self)
        store.tell(key, found.ring)
        done()
        return found

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of ``bodies`` in a thread of its own; returns what they return."""
        values: dict[int, T] = {}
        before = threading.stack_size(_STACK)

        def main(number: int, gate: threading.Lock) -> None:
            gate.acquire()
            self._gates[threading.get_ident()] = gate
            try:
                values[number] = bodies[number]()
            finally:
                self._turn.release()

        for number in range(len(bodies)):
            gate = threading.Lock()
            gate.acquire()
            self.at(0.0, self._turn_of(gate))
            threading.Thread(target=main, args=(number, gate), daemon=True).start()
        threading.stack_size(before)
        while len(values) < len(bodies):
            self._now, _, act = heapq.heappop(self._due)
            act()
        return [values[number] for number in range(len(bodies))]

    # ------------------------------------------------------------------------ turns

    def _turn_of(self, gate: threading.Lock) -> Callable[[], None]:
        def act() -> None:
            gate.release()
            self._turn.acquire()

        return act

    def _pause(self, until: float, bell: _Awaited | None = None) -> None:
        """Give the turn away, to have it again at ``until`` or when ``bell`` rings."""
        gate, is_due = self._gates[threading.get_ident()], True

        def wake() -> None:
            nonlocal is_due
            if is_due:
                is_due = False
                self._turn_of(gate)()

        self.at(until, wake)
        if bell is not None:
            bell.wakes(lambda: self.at(self._now, wake))
        self._turn.release()
        gate.acquire()


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
        self._is_there = False
        self._wake: Callable[[], None] = lambda: None

    def ring(self) -> None:
        """Take in that the key is there."""
        self._is_there = True
        self._wake()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the key is there."""
        self._wake = wake

    def wait(self, seconds: float) -> bool:
        if not self._is_there:
            self._clock._pause(self._clock.now() + seconds, self)
        return self._is_there
