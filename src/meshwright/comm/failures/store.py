"""A client of the run's store that works in its own thread, so that no caller blocks forever.

A store answers only while its host lives. A host that has ended closes the connection. A stopped
host never answers, and c10d waits without a bound. So one daemon thread makes the requests, and
callers wait for the thread, until `StoreClient.give_up` declares the host lost. Callers then get
`RankFailedError`, naming the host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import RankFailedError
from meshwright.torch_internals.distributed import default_store

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator

T = TypeVar("T")

Store = Any
"""A client of a store: c10d's, or one of a test that counts requests."""

STORE = -1
"""Stands for the host of the store in place of a rank, where that is none of the ranks."""

EVERY = 0.25
"""Seconds between two looks of a rank at the board, in worlds that are not large."""

ALL = "all"
"""The word that tells waiting ranks that all have arrived."""

_NOTHING = "\x01nothing"
"""What ``compare_set`` answers for a missing key when this is the expected value."""

_SERVER = re.compile(r"server=(?!<nullptr>)")

_SLICE = 0.2
"""Seconds of one wait for the thread; after each, the caller checks that the store is not lost."""

_NEVER = timedelta(days=1)
"""c10d's bound of a wait in the server. c10d prints a warning where one passes."""


class StoreClient:
    """The keys of a store, for all threads of this process.

    Every method raises `RankFailedError`, naming ``host``, when the store's host is lost. Every
    ``every`` seconds the thread calls ``look``, if one is set.
    """

    def __init__(
        self, store: Store, *, host: int, every: float = EVERY, clock: SystemClock | None = None
    ) -> None:
        """Start the thread. ``host`` is the rank in whose process the store lives, or `STORE`."""
        self.host = host
        self.every = every
        self.clock = clock or SystemClock()
        self.look: Callable[[], None] | None = None
        """Called in the thread now and then."""
        self._given = store  # with it goes the server, where this process is the host
        self._client: Store | None = None
        """The client of the thread, which makes it with its first request."""
        self._free: list[Store] = []
        """Clients that wait for nothing now."""
        self._arrivals: list[KeyWait] = []
        self.lost: RankFailedError | None = None
        """The error of every request from now on; None while the store answers."""
        self._busy_since: float | None = None
        self._worker = self.clock.worker(self._look, every)

    @property
    def host_process(self) -> str:
        """Describe the host's process for messages."""
        if self.host != STORE:
            return "its process"
        is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_agent:
            return "torchrun's agent"
        return "the process that hosts it (rank 0's, unless a launcher serves it)"

    @property
    def silence(self) -> float:
        """Seconds for which a request has been unanswered; 0 without one."""
        since = self._busy_since
        return 0.0 if since is None else self.clock.now() - since

    def give_up(self, reason: str) -> RankFailedError:
        """Declare the host lost: callers that wait for an answer raise. Returns the error."""
        if self.lost is None:
            is_rank = self.host != STORE
            host = f"rank {self.host}, which hosts the store," if is_rank else "the run's store"
            self.lost = RankFailedError(f"{host} failed first: {reason}", self.host)
            self.nudge()
        return self.lost

    def run(self, work: Callable[[], T]) -> T:
        """Have the thread call ``work``; no other request interleaves with it."""
        return self._worker.run(work, self._refuse)

    def later(self, work: Callable[[], object]) -> None:
        """Have the thread call ``work`` later, without waiting for it."""
        self._worker.later(work)

    def stop(self) -> None:
        """End the thread after its queued work, unless the store is silent."""
        self.look = None
        self._worker.stop(0.1 if self.lost is not None else 5.0)

    # ---------------------------------------------------------------- requests

    def set(self, key: str, value: str) -> None:
        self._request(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Return the value under ``key``; None when there is none."""
        return self._request(lambda: self._found(key))

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Read the values under ``keys``, all of which exist, in one request."""
        return self._request(lambda: list(map(_text, self._store.multi_get(list(keys)))))

    def check(self, keys: Sequence[str]) -> bool:
        return self._request(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return self._request(lambda: self._store.add(key, amount))

    def append(self, key: str, value: str) -> None:
        self._request(lambda: self._store.append(key, value))

    def arrival(self, key: str) -> KeyWait:
        """Start to wait for ``key`` in the server, without blocking other callers.

        Each wait has its own client, because it blocks all other calls of that client; a client
        whose wait has ended is reused.
        """
        client = self._free.pop() if self._free else self._request(self._connect)
        arrival = self.clock.arrival(client, key, lambda: self._free.append(client))
        self._arrivals = [each for each in self._arrivals if not each.has_come]
        self._arrivals.append(arrival)
        return arrival

    def nudge(self) -> None:
        """Wake up callers that wait for a key, so that they look at something else."""
        for arrival in self._arrivals:
            arrival.nudge()

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set ``key`` to ``value`` if it holds ``expected``, or if it is missing and that is "".

        Returns the value that the key holds then. If it is missing and ``expected`` is not "",
        nothing is set, and ``expected`` is returned.
        """
        return self._request(lambda: _text(self._store.compare_set(key, expected, value)))

    def delete_key(self, key: str) -> None:
        self._request(lambda: self._store.delete_key(key))

    # ---------------------------------------------------------------- private

    @property
    def _store(self) -> Store:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Store:
        """Make a client of the store; each serves one request at a time, and so one thread.

        For the board's thread: where nobody listens, c10d silently retries for a long time.
        """
        try:
            self._given.check(["host"])  # raises at once where the host has gone
            return self._given.clone()
        except RuntimeError as error:
            # A store that is written in Python has no `clone`; it is shared, and has its own locks.
            if "pure virtual function" not in str(error):
                raise
            return self._given

    def _found(self, key: str) -> str | None:
        # Not `get`, which would wait for a key that another rank has removed in between.
        value = _text(self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if value == _NOTHING else value

    def _request(self, request: Callable[[], T]) -> T:
        return self.run(functools.partial(self._ask, request))

    def _ask(self, request: Callable[[], T]) -> T:
        """Make one request to the store; runs in the thread."""
        self._refuse()
        self._busy_since = self.clock.now()
        try:
            return request()
        except RuntimeError as error:
            said = " ".join(str(error).split("\nException raised from", 1)[0].split())
            self.give_up(f"it cannot be reached: {self.host_process} has ended: {said[:200]}")
            raise self._again() from error
        finally:
            self._busy_since = None

    def _again(self) -> RankFailedError:
        """Make a new error each time: several threads raising one would mix up their tracebacks."""
        lost = self.give_up("it is closed")
        return RankFailedError(str(lost), lost.rank)

    def _refuse(self) -> None:
        if self.lost is not None:
            raise self._again()

    def _look(self) -> None:
        if self.look is not None and self.lost is None:
            with contextlib.suppress(RankFailedError):  # it is kept in `lost`
                self.look()


class Notices:
    """Short texts that the ranks of one communicator exchange under one topic.

    A failure on the board ends the run of every rank; a notice concerns one operation.

    Every method raises `RankFailedError`, naming the store's host, when that is lost.
    """

    def __init__(self, communicator: Communicator, topic: str) -> None:
        self._board = _board(communicator)
        self._prefix = f"notices/{communicator.name}/{topic}"

    def post(self, key: str, text: str) -> bool:
        """Store ``text`` under ``key`` unless there is a text; returns whether it was stored."""
        return self._board.compare_set(f"{self._prefix}/{key}", "", text) == text

    def replace(self, key: str, text: str) -> None:
        """Store ``text`` under ``key``, replacing any text there."""
        self._board.set(f"{self._prefix}/{key}", text)

    def read(self, key: str) -> str | None:
        """Return the text under ``key``; None when there is none."""
        return self._board.get(f"{self._prefix}/{key}") or None


def _board(communicator: Communicator) -> StoreClient:
    """Return the run's board, or one cached on the communicator if the run is not watched."""
    if PROCESS.monitor is not None:
        return PROCESS.monitor.board
    if "board" not in communicator.kept:
        # The store of ranks that are no processes answers nothing.
        is_fake = communicator.backend == "fake"
        store = dist.HashStore() if is_fake else default_store()
        communicator.kept["board"] = StoreClient(store, host=STORE)
    board: StoreClient = communicator.kept["board"]
    return board


def hosts(store: Store) -> bool:
    """Whether the server of ``store`` is in this process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and _SERVER.search(repr(store)) is not None


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Gathering:
    """A barrier of ``size`` ranks, each with an optional line of text.

    The last rank to arrive announces it; the others wait for that in the server::

        rank ──line──> key/said ──one more──> key ──the last of all──> key/all
    """

    def __init__(self, board: StoreClient, key: str, size: int) -> None:
        self.key = key
        self._board, self._size = board, size
        self._arrival: KeyWait | None = None

    def come(self, line: str = "") -> bool:
        """Arrive, with ``line`` (no newline in it); returns whether all others had arrived."""
        if line:
            self._board.append(f"{self.key}/said", f"{line}\n")
        is_last = self._board.add(self.key, 1) >= self._size
        if is_last:
            self.close(ALL)
        return is_last

    def close(self, word: str) -> None:
        """End the wait of the others with ``word``: `ALL`, or anything else for a failure."""
        self._board.set(f"{self.key}/all", word)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; returns whether all have arrived. A failure ends it."""
        if self._arrival is None:
            self._arrival = self._board.arrival(f"{self.key}/all")
        if not self._arrival.wait(seconds):
            return False
        if self._board.get(f"{self.key}/all") == ALL:
            return True
        if self._board.look is not None:  # it stands on the board
            self._board.run(self._board.look)
        # The key is there for good, so no further wait for it would take any time.
        self._board.clock.sleep(min(seconds, self._board.every))
        return False

    def lines(self) -> list[str]:
        """Read the lines of those who have arrived, in any order."""
        return (self._board.get(f"{self.key}/said") or "").splitlines()

    def forget(self) -> None:
        """Remove its keys, once every rank has arrived, waited and read."""
        for key in (f"{self.key}/said", f"{self.key}/all", self.key):
            self._board.delete_key(key)


# ---------------------------------------------------------------- time and threads


class SystemClock:
    """The system's time and threads."""

    def now(self) -> float:
        """Return seconds on a monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds on a clock that is roughly equal on all hosts."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def worker(self, look: Callable[[], object], every: float) -> Worker:
        """Start a thread that runs submitted work, and calls ``look`` every ``every`` seconds."""
        return Worker(look, every)

    def arrival(self, store: Store, key: str, done: Callable[[], None]) -> KeyWait:
        """Start to wait for ``key`` in the server, through ``store``, an unused client.

        ``done`` is called when the client is free again.
        """
        return KeyWait(store, key, done)


class Worker:
    """A daemon thread, so that a caller waiting in vain for a store can abandon it."""

    def __init__(self, look: Callable[[], object], every: float) -> None:
        self._look = look
        self._every = every
        self._has_stopped = False
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="meshwright-board", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T], refuse: Callable[[], None]) -> T:
        """Have ``work`` done and return its value; ``refuse`` may raise meanwhile."""
        # In the thread itself an order would wait for the one that gives it; after the end of the
        # thread nobody else uses the client.
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


class KeyWait:
    """A wait for a key in the server: one request, however long it takes."""

    def __init__(self, store: Store, key: str, done: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._done = done
        self.has_come = False
        """True when the key is there."""
        self._bell = threading.Event()
        threading.Thread(target=self._main, name="meshwright-arrival", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for the key, a `nudge`, or ``seconds``; returns whether the key is there."""
        if not self.has_come:
            self._bell.wait(seconds)
            self._bell.clear()
        return self.has_come

    def nudge(self) -> None:
        """End the current or the next wait, because there is something else to look at."""
        self._bell.set()

    def _main(self) -> None:
        # A store that cannot be reached any more is for the board to find: it keeps asking.
        with contextlib.suppress(RuntimeError):
            self._store.wait([self._key], _NEVER)
            self._done()
            self.has_come = True
            self._bell.set()


def carry_out(work: Callable[[], T], order: Future[T]) -> None:
    """Do ``work``, and pass its value or error to those who wait for ``order``."""
    try:
        order.set_result(work())
    except BaseException as error:  # whoever waits gets it
        order.set_exception(error)
