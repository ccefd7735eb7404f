"""The clock of the control plane: time, pauses, a thread that works beside, waits in the server.

All that depends on time passes it, so that a test may put simulated time in its place.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Protocol, TypeVar

T = TypeVar("T")

_SLICE = 0.2
"""Seconds of one wait for the thread; after each, whether it can still answer is looked at."""

_NEVER = timedelta(days=1)
"""c10d's bound of a wait in the server. c10d prints a warning where one passes."""


class Store(Protocol):
    """A client of a store, of c10d's or one that counts; as c10d's types describe it."""

    def set(self, key: str, value: str, /) -> object:
        """Leave ``value`` under ``key``."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all ``keys`` have values."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number under ``key``; returns the sum."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Replace ``expected``, "" for no value, by ``value``; returns what is there now."""
        ...

    def delete_key(self, key: str, /) -> object:
        """Remove ``key`` and its value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Wait until all ``keys`` have values."""


class Worker(Protocol):
    """The worker that makes all requests of one store, one after the other."""

    def run(self, work: Callable[[], T], refuse: Callable[[], None]) -> T:
        """Have ``work`` done and return its value; ``refuse`` may raise meanwhile."""
        ...

    def later(self, work: Callable[[], object]) -> None:
        """Have ``work`` done when its turn comes; nobody waits."""

    def stop(self, seconds: float) -> None:
        """End after what was given, within ``seconds``."""


class Arrival(Protocol):
    """A key of a store that is waited for in the server: one request, however long it takes."""

    @property
    def has_come(self) -> bool:
        """True when the key is there."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait for the key, a `nudge`, or ``seconds``; tells whether the key is there."""
        ...

    def nudge(self) -> None:
        """End a wait of the thread that waits, or the next one: there is something to look at."""


class Clock:
    """The system's time and threads."""

    def now(self) -> float:
        """Return seconds on a clock that only goes forward."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds on a clock that all hosts roughly share."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)

    def worker(self, look: Callable[[], object], every: float) -> Worker:
        """Begin a thread that does what it is given, and calls ``look`` every so many seconds."""
        return _Thread(look, every)

    def arrival(self, store: Store, key: str, done: Callable[[], None]) -> Arrival:
        """Begin to wait for ``key`` in the server, through ``store``, a client that nobody uses.

        ``done`` is called when the client is free again.
        """
        return _Arrival(store, key, done)


class _Thread:
    """A daemon thread: whoever waits in vain for an answer of a store can leave it behind."""

    def __init__(self, look: Callable[[], object], every: float) -> None:
        self._look = look
        self._every = every
        self._has_stopped = False
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="meshwright-board", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T], refuse: Callable[[], None]) -> T:
        if self._has_stopped or threading.current_thread() is self._thread:
            return work()
        order: Future[T] = Future()
        self._orders.put(functools.partial(carry_out, work, order))
        while not wait([order], timeout=_SLICE).done:
            refuse()
        return order.result()

    def later(self, work: Callable[[], object]) -> None:
        self._orders.put(functools.partial(carry_out, work, Future()))

    def stop(self, seconds: float) -> None:
        self._orders.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=seconds)
        self._has_stopped = not self._thread.is_alive()

    def _main(self) -> None:
        next_look = time.monotonic() + self._every
        while True:
            try:
                order = self._orders.get(timeout=max(0.0, next_look - time.monotonic()))
                if order is None:
                    return
                order()
            except queue.Empty:
                pass
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + self._every


class _Arrival:
    def __init__(self, store: Store, key: str, done: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._done = done
        self.has_come = False
        self._bell = threading.Event()
        threading.Thread(target=self._main, name="meshwright-arrival", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        if not self.has_come:
            self._bell.wait(seconds)
            self._bell.clear()
        return self.has_come

    def nudge(self) -> None:
        self._bell.set()

    def _main(self) -> None:
        # A store that cannot be reached any more is for the board to find: it keeps asking.
        with contextlib.suppress(RuntimeError):
            self._store.wait([self._key], _NEVER)
            self._done()
            self.has_come = True
            self._bell.set()


def carry_out(work: Callable[[], T], order: Future[T]) -> None:
    """Do ``work``, and give its value or error to those who wait for ``order``."""
    try:
        order.set_result(work())
    except BaseException as error:  # whoever waits gets it
        order.set_exception(error)
