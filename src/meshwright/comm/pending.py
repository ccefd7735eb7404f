"""An issued collective, and the bounded wait for it."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import DistBackendError

from meshwright.comm.failures.status import users_line
from meshwright.comm.failures.waiting import (
    AwaitedOperation,
    BoundedWait,
    Issued,
    is_of_a_transport,
)
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.streams import record
from meshwright.timeline import Collective

if TYPE_CHECKING:
    import torch

    from meshwright.comm.collectives import Communicator
    from meshwright.comm.groups.in_flight import Flight
    from meshwright.comm.streams import DeviceEvent, Mark

SLICE = timedelta(seconds=0.5)
"""The length of one wait inside c10d, after which failures of the peers are checked."""


IDLE_FOR = 10.0
"""Seconds after which a thread that has nothing to wait for ends."""


class Work(Protocol):
    """The handle that c10d returns for an asynchronous operation."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait at most ``timeout``; raises RuntimeError when it failed or has not ended by then."""

    def is_completed(self) -> bool:
        """Check whether it has ended, successfully or not."""


class _WaiterThread(threading.Thread):
    """A thread for the unbounded waits of point-to-point works, one after another."""

    def __init__(self) -> None:
        super().__init__(name="meshwright-transfer-wait", daemon=True)
        self.inbox: queue.SimpleQueue[TransferWaiter] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                self.inbox.get(timeout=IDLE_FOR).run_here()
            except queue.Empty:
                try:
                    PROCESS.idle_waiters.remove(self)
                except ValueError:  # somebody has just taken it
                    continue
                return


Launched = tuple[Sequence[Work], Callable[[], None] | None]
"""The works that were started, and the function that runs once after the last of them."""


class TransferWaiter:
    """Waits for one point-to-point work in a thread of its own.

    A Gloo transfer cannot be polled, and a wait that times out closes the connection of the two
    ranks for good. So a daemon thread waits without a bound, and the caller's bounded waits are on
    a lock. The thread is taken from ``idle`` and returned there.
    """

    def __init__(self, work: Work, idle: list[_WaiterThread]) -> None:
        self._work = work
        self._idle = idle
        self._running = threading.Lock()
        """Held until the transfer has ended: a lock costs a fraction of an event."""
        self._running.acquire()
        self._error: BaseException | None = None
        self._has_started = False
        """True once a thread has got it: whoever waits holds the lock for a moment, too."""
        self._thread: _WaiterThread | None = None
        self._is_last = True
        """True when the thread has nothing else to wait for after it."""

    @staticmethod
    def start_together(waiters: Sequence[TransferWaiter]) -> None:
        """Have one thread wait for all ``waiters`` that nobody waits for yet, one by one.

        A caller that then waits for the last is woken once, not after each.
        """
        fresh = [waiter for waiter in waiters if not waiter._has_started]
        thread = None
        for waiter in fresh:
            thread = waiter._start(thread, is_last=waiter is fresh[-1])

    def is_completed(self) -> bool:
        """Check whether the transfer has ended; starts the waiting thread if there is none."""
        self._start()
        return not self._running.locked()

    def wait(self, timeout: timedelta = SLICE) -> None:
        """Wait at most ``timeout``; raises RuntimeError when it has not ended by then."""
        self._start()
        if not self._running.acquire(timeout=timeout.total_seconds()):
            raise RuntimeError("the transfer has not ended yet")
        self._running.release()
        if self._error is not None:
            raise self._error

    def run_here(self) -> None:
        """Wait in this thread, then return the thread."""
        try:
            self._work.wait()
        except BaseException as error:  # it is raised again by the rank's own wait
            self._error = error
        thread, self._thread = self._thread, None
        # Before the lock: whoever it wakes may begin the next transfer, and then takes this thread.
        if thread is not None and self._is_last:
            self._idle.append(thread)
        self._running.release()

    def _start(
        self, thread: _WaiterThread | None = None, *, is_last: bool = True
    ) -> _WaiterThread | None:
        """Give it to ``thread``, or to any idle thread."""
        if not self._has_started:
            self._has_started = True
            self._is_last = is_last
            if thread is None:
                try:  # another thread of the user's may take the last
                    thread = self._idle.pop()
                except IndexError:
                    thread = _WaiterThread()
                    thread.start()
            self._thread = thread
            thread.inbox.put(self)
        return thread


def start_together(pendings: Iterable[Pending]) -> None:
    """Start to wait for ``pendings`` in the background, if waiting needs a thread.

    Not if calls are compared: other ranks would see this rank as waiting for a message.
    """
    if PROCESS.checks is not None:
        return
    works = [work for pending in pendings for work in pending.works]
    TransferWaiter.start_together([work for work in works if isinstance(work, TransferWaiter)])


class Pending:
    """A collective in flight. Only callers that need its value wait.

    ``wait`` may be called more than once: later calls return the value at once, and on a device
    also order the stream that is current then.
    """

    __slots__ = (
        "_finished",
        "_flight",
        "_value",
        "communicator",
        "finish",
        "issued",
        "observed",
        "works",
    )

    def __init__(
        self, communicator: Communicator, issued: Issued, value: torch.Tensor | None
    ) -> None:
        self.communicator = communicator
        self.issued = issued
        self._value = value
        self.works: Sequence[Work] = ()
        """The works that `wait` waits for; on the host, only those not waited for yet."""
        self.finish: Callable[[], None] | None = None
        """Runs once, after the last of the works."""
        self._finished: DeviceEvent | None = None
        """The point of a device's stream at which its value was there."""
        self._flight: Flight | None = None
        self.observed: tuple[Collective, Mark] | None = None
        """The operation and its start, to tell the observers when it completes."""

    def followed(self, launch: Callable[[Any], Launched]) -> Callable[[Any], Launched]:
        """Wrap ``launch`` to track the operation from before the call until the device ends it."""

        def noted(group: Any) -> Launched:  # noqa: ANN401 - as launches
            line = users_line(sys._getframe(2))
            flight = PROCESS.flights.begin(self.communicator, self.issued, line)
            try:
                works, finish = launch(group)
            except BaseException:
                if flight is not None:
                    flight.ended()
                raise
            if flight is not None:
                flight.launched(works)
            self._flight = flight
            return works, finish

        return noted

    def is_completed(self) -> bool:
        """Check whether a wait would return at once."""
        return all(work.is_completed() for work in self.works)

    def wait(
        self, timeout: float | None = None, *, watch: Callable[[], None] | None = None
    ) -> torch.Tensor | None:
        """Wait until the operation has ended on this rank, and return its tensor.

        ``timeout`` is in seconds; None takes the communicator's. ``watch`` is called now and then
        while the host waits: its exception ends the wait, and the operation continues. On CUDA the
        current stream waits, not the host, which waits for Gloo only.

        Raises `RankFailedError` when another rank failed first, `CollectiveTimeoutError` at the
        bound, `CollectiveMismatchError` when the peers issued something else, all naming ranks.
        """
        if PROCESS.stopped is not None:
            PROCESS.refuse()
        if self.communicator.waits_on_host:
            for work in self.works:
                try:
                    work.wait(SLICE)
                    continue
                except RuntimeError:
                    pass
                self._wait_on(work, timeout, watch)
            if self.communicator.is_on_host:
                # On a device they stay: each later wait orders the stream that is current then.
                self.works = ()
        else:
            for work in self.works:
                work.wait()
        if self.finish is not None:
            finish, self.finish = self.finish, None  # first: it may raise, and runs once
            finish()
            if not self.communicator.is_on_host:
                self._finished = record(self.communicator.device)
        elif self._finished is not None:
            self._finished.wait()
        if self._flight is not None:
            self._flight.waited(self._finished or record(self.communicator.device))
            self._flight = None
        if self.observed is not None:
            (collective, start), self.observed = self.observed, None
            PROCESS.tell("completed", collective, start, self.communicator.clock.mark())
        return self._value

    def describe(self) -> str:
        """Describe the operation in one phrase: kind, number, label, axis."""
        return self.issued.describe(self.communicator.axis)

    def explain_call(self, error: RuntimeError) -> None:
        """Raise the reason for a transport's ``error`` in the call itself, naming the rank behind
        it.

        Returns for other kinds of errors, and if this process is no member of a run.
        """
        if not isinstance(error, DistBackendError) and not is_of_a_transport(error):
            return
        PROCESS.refuse()
        monitor = PROCESS.monitor
        if monitor is not None:
            BoundedWait(monitor, AwaitedOperation(self.communicator, self.issued), None).explain(
                error
            )

    def _wait_on(self, work: Work, timeout: float | None, watch: Callable[[], None] | None) -> None:
        """Continue a wait after its first slice, or after its work has failed."""
        monitor = PROCESS.monitor
        limit = self.communicator.timeout if timeout is None else timeout
        if monitor is None:
            self._wait_alone(work, limit, watch)
            return
        with BoundedWait(monitor, AwaitedOperation(self.communicator, self.issued), limit) as peers:
            while not work.is_completed():
                if watch is not None:
                    watch()
                peers.look()
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError:  # kept by nobody, as it would keep the tensors of its frames
                    continue
            try:
                work.wait(SLICE)
            except RuntimeError as final:
                if watch is not None:
                    watch()
                peers.explain(final)

    def _wait_alone(
        self, work: Work, limit: float | None, watch: Callable[[], None] | None
    ) -> None:
        """Wait in a process whose groups were made without `connect`."""
        until = float("inf") if limit is None else time.monotonic() + limit
        while not work.is_completed():
            if watch is not None:
                watch()
            if time.monotonic() > until:
                raise RuntimeError(f"{self.describe()} has not ended after {limit:g} s")
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                continue
        work.wait(SLICE)
