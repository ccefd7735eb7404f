"""The collectives of a group in the order of their calls, and the works that stand for them.

A synchronous call runs in its caller's thread when nothing is ahead of it. An asynchronous one
takes its first step at once, if nothing is ahead, and is finished by the caller in ``wait`` or by
the background thread, whichever comes first. So a wait right after the call needs no thread switch,
and a missing wait does not hold up the peers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter

import torch
from torch.futures import Future

from meshwright.comm.c10d.calls import Call
from meshwright.comm.failures.waiting import watched
from meshwright.comm.shared_memory.waits import Meeting, Steps, unusable
from meshwright.errors import CollectiveTimeoutError
from meshwright.torch_internals.distributed import Work

SLICE = 0.5
"""Seconds of a wait without a bound before failures of other ranks are checked, as in `pending`."""
TICK = 0.0005
"""Seconds between two looks of the background thread while there is work."""
SLOWEST_TICK = 0.004
LINGER = 25
"""Looks without any work after which the background thread sleeps until it is called."""
BURST = 0.002
"""Seconds for which the background thread waits inside an operation of several steps."""
CALLBACKS_END = 1.0
"""Seconds for which a queue that is closed waits for threads that run callbacks."""
_NBYTES = attrgetter("nbytes")

URGENT_BYTES = 256 << 10
"""From this size on, the background thread is called at once instead of at its next look."""


class SharedWork(Work):
    """c10d's handle of an operation: `wait` and a future, which raise its error."""

    def __init__(self, outputs: Sequence[torch.Tensor], held: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.outputs = outputs
        self.held = held
        """Inputs, which are kept until the operation has ended."""
        self.done = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._root: Future[None] | None = None
        self._future: Future[Sequence[torch.Tensor]] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as ended. Called once, before `announce`."""
        self.held = ()
        self.error = error
        self.done = True

    @property
    def is_awaited(self) -> bool:
        """True when there is a future to complete."""
        return self._root is not None

    def announce(self) -> None:
        """Complete the future. Its callbacks may issue further operations: hold no lock."""
        with self._lock:
            root, self._root = self._root, None
        if root is not None:
            root.set_result(None)

    def get_future(self) -> Future[Sequence[torch.Tensor]]:  # type: ignore[override]
        """Make a future of the list of tensors.

        Its error is raised by a callback: C++ does not see ``Future.set_exception``.
        """
        with self._lock:
            if self._future is None:
                root: Future[None] = Future()
                self._future = root.then(self._value)
                if self.done:
                    root.set_result(None)
                else:
                    self._root = root
            return self._future

    def _value(self, _: object) -> Sequence[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation has ended; raises its error.

        With a ``timeout`` it raises `CollectiveTimeoutError` when that passes first. The operation
        continues, and can be waited for again.
        """
        seconds = timeout.total_seconds()  # c10d's 0 means: no bound of this call's own
        if not self.done and seconds > 0:
            if not self._drive(time.monotonic() + seconds):
                raise CollectiveTimeoutError(self._late(seconds))
        elif not self.done and not self._drive(time.monotonic() + SLICE):
            with watched(str(self)) as look:
                while not self._drive(time.monotonic() + SLICE):
                    look()
        if self.error is not None:
            raise self.error
        return True

    def _drive(self, until: float) -> bool:
        """Advance the operation until it ends; False when ``until`` comes first."""
        raise NotImplementedError

    def _late(self, seconds: float) -> str:
        """Describe the missing ranks after ``seconds``."""
        raise NotImplementedError


class JoinedWork(SharedWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[SharedWork]) -> None:
        super().__init__([tensor for work in works for tensor in work.outputs])
        self.works = works

    def get_future(self) -> Future[Sequence[torch.Tensor]]:  # type: ignore[override]
        futures = [work.get_future() for work in self.works]
        return torch.futures.collect_all(futures).then(self._values)

    def _values(
        self, futures: Future[list[Future[Sequence[torch.Tensor]]]]
    ) -> Sequence[torch.Tensor]:
        return [tensor for future in futures.value() for tensor in future.value()]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> BaseException | None:
        return next((work.error for work in self.works if work.error is not None), None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True


class _QueuedCollective(SharedWork):
    """A collective in the queue."""

    def __init__(
        self,
        queue: OperationQueue,
        call: Call,
        body: Steps,
        outputs: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(outputs, held)
        self.queue = queue
        self.call = call
        self.body = body
        self.started = False
        self.limit = float("inf")

    def __str__(self) -> str:
        return str(self.call)

    def start(self) -> None:
        """Take the first step, which never blocks; requires the lock of the queue."""
        meeting = self.queue.meeting
        self.started = True
        if meeting.broken is not None:
            self.queue.end(self, unusable(meeting.broken))
            return
        self.limit = time.monotonic() + meeting.timeout
        try:
            next(self.body)
        except StopIteration:
            self.queue.end(self, None)
        except BaseException as error:  # whoever waits for the operation gets it
            self.queue.end(self, error)

    def _drive(self, until: float) -> bool:
        return self.queue.drive(self, until)

    def _late(self, seconds: float) -> str:
        return self.queue.meeting.describe_missing(self.call, seconds)


class _Announcer(threading.Thread):
    """Completes one future after another; callbacks may wait for further operations."""

    def __init__(self, idle: list[_Announcer], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._idle = idle
        self._inbox: queue.SimpleQueue[_QueuedCollective | None] = queue.SimpleQueue()
        self.start()

    def take(self, operation: _QueuedCollective | None) -> None:
        """Announce ``operation``; None ends the thread."""
        self._inbox.put(operation)

    def run(self) -> None:
        while (operation := self._inbox.get()) is not None:
            operation.announce()
            del operation  # with its tensors, which a thread that waits would keep
            self._idle.append(self)


class Background:
    """A daemon thread that calls ``advance`` now and then while ``has_work`` says so.

    Waking a sleeping thread costs the caller more than a small collective. So the thread polls as
    long as work keeps coming, and is woken only when it sleeps.
    """

    def __init__(
        self,
        name: str,
        has_work: Callable[[], bool],
        advance: Callable[[], bool],
        fail: Callable[[Exception], None],
    ) -> None:
        """``fail`` is called with an unexpected error of ``advance``."""
        self._name = name
        self._fail = fail
        self._has_work = has_work
        self._advance = advance
        self._bell = threading.Lock()
        self._bell.acquire()
        self._awake = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def call(self, *, urgent: bool) -> None:
        """Tell the thread that there is work."""
        if self._awake and not urgent:
            return
        self._awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._ring()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._closed = True
        self._ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:  # it is ringing already
            return

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            self._look_again()
        except Exception as error:  # without this thread others would wait for ever
            self._fail(error)

    def _look_again(self) -> None:
        idle, tick = 0, TICK
        while not self._closed:
            if idle > LINGER:
                self._awake = False  # before the look: work that comes after that rings the bell
                if not self._has_work():
                    self._bell.acquire()
                self._awake, idle = True, 0
                continue
            if self._bell.acquire(timeout=tick):
                tick = TICK
            has_work = self._has_work()
            idle = 0 if has_work else idle + 1
            moved = has_work and self._advance()
            tick = TICK if moved else min(2 * tick, SLOWEST_TICK)


class OperationQueue:
    """The FIFO of one group. The holder of its lock advances the first operation."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting = meeting
        self._lock = threading.Lock()
        self._pending: deque[_QueuedCollective] = deque()
        self._ended: deque[_QueuedCollective] = deque()
        self._checked = 0.0
        self._name = name
        self._announcers: list[_Announcer] = []
        self._idle_announcers: list[_Announcer] = []
        self._background = Background(
            name, lambda: bool(self._pending), self._look, meeting.break_with
        )

    def submit(
        self,
        call: Call,
        body: Steps,
        outputs: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor] = (),
        *,
        run_now: bool,
    ) -> SharedWork:
        """Run the operation now, to its end or to its first wait, or after those ahead of it."""
        operation = _QueuedCollective(self, call, body, outputs, held)
        if self.meeting.broken is not None:
            raise unusable(self.meeting.broken)
        if not self._pending and self._lock.acquire(blocking=False):
            try:
                is_first = not self._pending  # another thread may have come in between
                self._pending.append(operation)
                if is_first and run_now:
                    self._advance(operation, time.monotonic() + SLICE)
                elif is_first:
                    operation.start()
            finally:
                self._lock.release()
            self._announce()
        else:  # atomic, without the lock: whoever holds that comes to it in its turn
            self._pending.append(operation)
        if run_now:
            operation.wait()
        elif not operation.done:
            nbytes = sum(map(_NBYTES, outputs))
            self._background.call(urgent=nbytes >= URGENT_BYTES)
        return operation

    def drive(self, operation: _QueuedCollective, until: float) -> bool:
        """Advance operations until ``operation`` has ended; False at ``until``."""
        while not operation.done:
            if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
                return operation.done
            try:
                while not operation.done:
                    if not self._advance(self._pending[0], until):
                        return False
            finally:
                self._lock.release()
                self._announce()
        return True

    def _announce(self, *, elsewhere: bool = False) -> None:
        """Complete the futures of operations that have ended.

        Callbacks may wait for operations that only the background thread advances. So it never runs
        callbacks itself; another thread does.
        """
        while self._ended:
            try:
                operation = self._ended.popleft()
            except IndexError:
                return
            if not elsewhere or not operation.is_awaited:
                operation.announce()
                continue
            try:
                announcer = self._idle_announcers.pop()
            except IndexError:
                announcer = _Announcer(self._idle_announcers, f"{self._name} callbacks")
                self._announcers.append(announcer)
            announcer.take(operation)

    def close(self) -> None:
        """End the threads; operations still waiting raise."""
        self._background.close()
        for announcer in self._announcers:
            announcer.take(None)  # after what it may be busy with
        until = time.monotonic() + CALLBACKS_END
        for announcer in self._announcers:
            if announcer is not threading.current_thread():
                announcer.join(timeout=max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------ with the lock held

    def _advance(
        self, operation: _QueuedCollective, until: float | None, awake_for: float | None = None
    ) -> bool:
        """Advance the first operation of the queue to its end; False when ``until`` comes first.

        Waits stay awake for `waits.AWAKE` seconds, or ``awake_for``.
        """
        meeting = self.meeting
        if not operation.started:
            operation.start()
        if operation.done:
            return True
        limit = operation.limit
        try:
            if not meeting.wait(until, limit, operation.call, awake_for):
                return False
            for _ in operation.body:
                if not meeting.wait(until, limit, operation.call, awake_for):
                    return False
        except BaseException as error:  # whoever waits for the operation gets it
            self.end(operation, error)
            if not isinstance(error, Exception):
                raise
            return True
        self.end(operation, None)
        return True

    def end(self, operation: _QueuedCollective, error: BaseException | None) -> None:
        """End ``operation``, the first of the queue, with ``error`` if it has failed."""
        if error is not None:
            self.meeting.break_with(error)
        operation.finish(error)
        self._pending.popleft()
        self._ended.append(operation)

    def _look(self) -> bool:
        """Poll once, in the background thread; returns whether anything has moved."""
        if not self._lock.acquire(blocking=False):
            return False
        moved = False
        try:
            while self._pending:
                operation = self._pending[0]
                if not operation.started:
                    operation.start()
                    moved = True
                elif self.meeting.all_arrived() or self._is_troubled(operation):
                    # This thread's core is wanted by the computation that runs beside it.
                    self._advance(operation, time.monotonic() + BURST, awake_for=0.0)
                    moved = True
                else:
                    break
        finally:
            self._lock.release()
        self._announce(elsewhere=True)
        return moved

    def _is_troubled(self, operation: _QueuedCollective) -> bool:
        """Check whether it is time to check the peers' processes and the limit."""
        now = time.monotonic()
        if now < self._checked:
            return False
        self._checked = now + 0.1
        return True
