"""The run's store as ranks may use it: in a thread of its own, so that nobody waits in it for ever.

A store answers only while its host lives. One that has ended closes the connection; one that is
stopped leaves a request without an answer, and c10d waits for it without a bound. So requests are
made by one daemon thread, and those who need them wait for the thread: until `Board.give_up` says
that the host is lost. Whatever the store does, its users see `RankFailedError` naming the host.
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
from typing import TypeVar

import torch.distributed as dist

from meshwright.errors import RankFailedError

T = TypeVar("T")

STORE = -1
"""Stands for the host of the store in place of a rank, where that is none of the ranks."""

_SLICE = 0.2
"""Seconds of one wait for the thread; after each, whether the host is lost is looked at."""

_NOTHING = "\x01nothing"
"""The answer of the store for a key that is not there, when asked whether this stands there."""

_SERVER = re.compile(r"server=(?!<nullptr>)")


class Board:
    """The keys of a store, for all threads of this process.

    Every method raises `RankFailedError` when the store's host is lost: `host` says who that is.
    ``every`` seconds the thread calls ``look``, when one is set.
    """

    def __init__(self, store: dist.Store, *, host: int, every: float = 0.25) -> None:
        """Begin the thread. ``host`` is the rank in whose process the store lives, or `STORE`."""
        self.host = host
        self.every = every
        self.look: Callable[[], None] | None = None
        """Called in the thread now and then."""
        self._given = store  # with it goes the server, where this process is the host
        self._store = _own_client(store)
        self.lost: RankFailedError | None = None
        """The error of every request from now on; None while the store answers."""
        self._busy_since: float | None = None
        self._has_stopped = False
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="meshwright-board", daemon=True)
        self._thread.start()

    @property
    def host_process(self) -> str:
        """Name the process of the host, for messages."""
        if self.host != STORE:
            return "its process"
        is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "torchrun's agent" if is_agent else "the process that hosts it"

    @property
    def silence(self) -> float:
        """Seconds since which the store has not answered a request."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def give_up(self, reason: str) -> RankFailedError:
        """Take the host for lost: who waits for an answer raises. Returns the error."""
        if self.lost is None:
            is_rank = self.host != STORE
            host = f"rank {self.host}, which hosts the store," if is_rank else "the run's store"
            self.lost = RankFailedError(f"{host} failed first: {reason}", self.host)
        return self.lost

    def run(self, work: Callable[[], T]) -> T:
        """Have the thread call ``work``, in which nobody else comes between two requests."""
        if self._has_stopped or threading.current_thread() is self._thread:
            return work()
        order: Future[T] = Future()
        self._orders.put(lambda: _carry_out(work, order))
        while not wait([order], timeout=_SLICE).done:
            if self.lost is not None:
                raise self._again()
        return order.result()

    def later(self, work: Callable[[], object]) -> None:
        """Have the thread call ``work`` when it comes to it; nobody waits."""
        self._orders.put(lambda: _carry_out(work, Future()))

    def learn_host(self, rank: int) -> None:
        """Learn that the store lives in the process of ``rank``."""
        self.host = rank

    def begin_looking(self, look: Callable[[], None]) -> None:
        """Have the thread call ``look`` now and then."""
        self.look = look

    def end_looking(self) -> None:
        """Have the thread do nothing but what it is given."""
        self.look = None

    def stop(self) -> None:
        """End the thread after what it has been given, unless the store is silent."""
        self.end_looking()
        self._orders.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=0.1 if self.lost is not None else 5.0)
        self._has_stopped = not self._thread.is_alive()

    # ---------------------------------------------------------------- requests

    def set(self, key: str, value: str) -> None:
        """Leave ``value`` under ``key``."""
        self._request(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Find the value under ``key``; None when there is none."""
        return self._request(lambda: self._found(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all ``keys`` have values."""
        return self._request(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; returns the sum."""
        return self._request(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Leave ``value`` unless something else than ``expected`` stands there; what stands now."""
        return self._request(lambda: _text(self._store.compare_set(key, expected, value)))

    def delete_key(self, key: str) -> None:
        """Remove ``key`` and its value."""
        self._request(lambda: self._store.delete_key(key))

    # ---------------------------------------------------------------- private

    def _found(self, key: str) -> str | None:
        # Not `get`, which would wait for a key that another rank has removed in between.
        value = _text(self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if value == _NOTHING else value

    def _request(self, request: Callable[[], T]) -> T:
        return self.run(functools.partial(self._ask, request))

    def _ask(self, request: Callable[[], T]) -> T:
        """Make one request of the store; in the thread."""
        if self.lost is not None:
            raise self._again()
        self._busy_since = time.monotonic()
        try:
            return request()
        except RuntimeError as error:
            said = " ".join(str(error).split("\nException raised from", 1)[0].split())
            self.give_up(f"it cannot be reached: {self.host_process} has ended: {said[:200]}")
            raise self._again() from error
        finally:
            self._busy_since = None

    def _again(self) -> RankFailedError:
        """Make a new error: one that several threads raise would mix up their tracebacks."""
        lost = self.give_up("it is closed")
        return RankFailedError(str(lost), lost.rank)

    def _run(self) -> None:
        next_look = time.monotonic() + self.every
        while True:
            try:
                order = self._orders.get(timeout=max(0.0, next_look - time.monotonic()))
                if order is None:
                    return
                order()
            except queue.Empty:
                pass
            if time.monotonic() >= next_look:
                if self.look is not None and self.lost is None:
                    with contextlib.suppress(RankFailedError):  # it is kept in `lost`
                        self.look()
                next_look = time.monotonic() + self.every


def _carry_out(work: Callable[[], T], order: Future[T]) -> None:
    try:
        order.set_result(work())
    except BaseException as error:  # whoever waits gets it
        order.set_exception(error)


def hosts(store: dist.Store) -> bool:
    """Tell whether the server of ``store`` lives in this process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and _SERVER.search(repr(store)) is not None


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _own_client(store: dist.Store) -> dist.Store:
    """Make a client of ``store`` for one thread: a client serves one request at a time."""
    try:
        return store.clone()  # pyrefly: ignore[missing-attribute]
    except RuntimeError as error:
        # A store that is written in Python has no `clone`; it is shared, and has its own locks.
        if "pure virtual function" not in str(error):
            raise
        return store
