"""A thread that watches this process and its neighbors, without using the store or the network.

It detects failures that ranks cannot report: a rank of this host whose process has ended; a silent
host of the store; a call of `torch.distributed` in which the main thread is stuck; a device
operation that does not end. If such a wait is hopeless, as a rank is lost or a limit has passed::

    device groups       all of them are aborted, and the program's next communication raises; if the
                        program hangs before that, the process ends
    none                the process ends: no exception can be raised in C++ from outside

Both name the rank. Nothing else ends a device's operations before c10d's limit, which is long. So a
process that uses a device holds a lease, which this thread renews. If it cannot, as in a driver
call that holds the interpreter lock, the lease ends the process, in C.

Programs also call `torch.distributed` directly, and may replace its functions, so it is not
wrapped. A thread is stuck in such a call when its innermost frame is

* in a file of `torch.distributed` or of our communication, or
* at a line that calls ``wait`` on a c10d work (which has no frame of its own), or
* in autograd's engine, which waits for collectives that C++ has begun,

and the thread has not run since the last look: a loop of short calls is at the same place, but runs
in between. Our own bounded waits end by themselves, and are left alone.
"""

from __future__ import annotations

import faulthandler
import linecache
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm.failures.failure import Failure, FailureMonitor
from meshwright.comm.failures.liveness import Waiting
from meshwright.comm.failures.processes import Stillness
from meshwright.comm.failures.status import ENGINE, line_of
from meshwright.comm.failures.store import STORE
from meshwright.comm.failures.waiting import (
    MISMATCH_AFTER,
    STILL,
    UNSEEN,
    Awaited,
    AwaitedOperation,
    BoundedWait,
    OutsideCall,
)
from meshwright.comm.groups.in_flight import Flight
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import CommunicationError, RankFailedError
from meshwright.torch_internals.distributed import (
    abort_together,
    groups_to_abort,
    recorded_operations,
)

_log = logging.getLogger("meshwright")

EVERY = 0.25
"""Seconds between two looks."""

SILENT_AFTER = 2.0
"""Seconds without an answer of the store after which its host is inspected."""

TELL_AFTER = 2.0
"""Seconds after which a rank that has not raised for a failure says that it knows of it."""

END_AFTER = 3.0
"""Seconds for which a call may still come back by itself after a rank was lost."""

RECOVER_AFTER = 30.0
"""The same after a rank has raised, since it may handle the error and arrive; and after an abort of
device groups, while the main thread works or has raised the error already."""

ABORT_WITHIN = 10.0
"""Seconds for which the abort of the groups of devices is waited for."""

RECORDED = 4
"""Operations of c10d's flight recorder that a report shows."""

LEASE = 3600.0
"""Seconds without a look of this thread after which a process with a device ends, at most."""

RENEW_EVERY = 15.0
"""Seconds between two renewals of that lease."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_C10D = os.path.dirname(os.path.abspath(dist.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMUNICATES = (_C10D, _OURS, os.path.join(_TORCH, "nn", "parallel") + os.sep)
_READS_FILES = os.path.join(_C10D, "checkpoint") + os.sep
"""A part of `torch.distributed` in which a thread may stand still with a file."""
_GLUE = (_TORCH, "<")
"""Files between a caller and C++ that say nothing of what is called."""
_WRAPPERS = frozenset({"wrapper", "inner", "_fn", "fn"})

_WAITS = re.compile(r"\b(wait|wait_tensor|_wait_for_pending_works)\(")
"""Calls of methods of C++ that return when an operation has ended."""

_SPURIOUS = 50e-6
"""CPU seconds between two looks in which no thread can come out of a call and into another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCall:
    """A call that has not returned."""

    number: int
    """Different for every call of this process."""
    what: str
    line: str
    """The user's line."""
    since: float
    """The first time that the thread was seen in it, on the monotonic clock."""

    def __str__(self) -> str:
        return f"{self.what}, called at {self.line}"


class _ThreadPlace(NamedTuple):
    """Where a thread is."""

    frames: tuple[object, ...] | None
    """Its innermost frames; None where they were not asked for."""
    work: float
    """The amount that it had run at the last look, as the system says."""
    since: float
    number: int


class CallWatch:
    """Finds the call that blocks this process, by the stacks of threads. For use by one thread."""

    def __init__(self, is_watched: Callable[[int], bool]) -> None:
        """``is_watched`` says whether a thread is in a bounded wait."""
        self._is_watched = is_watched
        self._places: dict[int, _ThreadPlace] = {}
        self._count = 0
        self.stands_still = False
        """True where the main thread has not run between the last two looks."""

    def look(self) -> StuckCall | None:
        """Return the call that blocks the main thread, if there is one.

        Another thread may have made it, when the main thread waits in C++ for that thread.
        """
        main = threading.main_thread()
        self.stands_still = self._is_still(main)
        if not self.stands_still:
            self._places = {k: v for k, v in self._places.items() if k == main.ident}
            return None
        others = [t for t in threading.enumerate() if not t.name.startswith("meshwright-")]
        for thread in [main, *(thread for thread in others if thread is not main)]:
            ident = thread.ident or 0
            if self._is_watched(ident) or (thread is not main and not self._is_still(thread)):
                continue
            frame = sys._current_frames().get(ident)
            what = None if frame is None else _communication(frame)
            if frame is not None and what is not None:
                place = self._places[ident]
                return StuckCall(
                    number=place.number, what=what, line=line_of(frame), since=place.since
                )
        return None

    def _is_still(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is where it was at the last look, and has not run since.

        Frames are read only if the main thread has not run: holding a frame keeps its locals alive,
        and with them graphs and activations of a running model.
        """
        ident, is_main = thread.ident or 0, thread is threading.main_thread()
        work, before = _work_of(thread), self._places.get(ident)
        has_run = before is None or work - before.work >= (_SPURIOUS if is_main else 1.0)
        here = None if has_run and is_main else _position(ident)
        if before is not None and not has_run and before.frames in (None, here):
            self._places[ident] = before._replace(frames=here, work=work)
            return True
        self._count += 1
        self._places[ident] = _ThreadPlace(here, work, time.monotonic(), self._count)
        return False


def _position(ident: int) -> tuple[object, ...] | None:
    """List the innermost frames of a thread and their positions; None if it has ended."""
    frame = sys._current_frames().get(ident)
    here: list[object] = []
    while frame is not None and len(here) < 8:
        here += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(here) or None


def _work_of(thread: threading.Thread) -> float:
    """Return the CPU seconds of the main thread, or another one's voluntary context switches."""
    if thread is threading.main_thread():
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        except (AttributeError, OSError):
            return 0.0
    try:  # the clock of a thread that has ended must not be asked for
        with open(f"/proc/self/task/{thread.native_id}/status", encoding="utf-8") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line)
        return float(rows["voluntary_ctxt_switches"])
    except (OSError, KeyError, ValueError):
        return 0.0


def _communication(frame: FrameType) -> str | None:
    """Name the communication that a blocked thread is in, by its innermost ``frame``; or None."""
    inner: FrameType | None = frame
    while inner is not None:
        file = inner.f_code.co_filename
        if file.startswith(_COMMUNICATES):
            return None if file.startswith(_READS_FILES) else _public_name(inner)
        if file == ENGINE and not torch.cuda.is_initialized():
            return "a backward pass"
        if not file.startswith(_GLUE):
            waits = _WAITS.search(linecache.getline(file, inner.f_lineno))
            return f"{waits[1]} of torch.distributed" if waits else None
        inner = inner.f_back
    return None


def _public_name(frame: FrameType) -> str:
    """Name the public function through which users have called ``frame``."""
    found, inner = frame, frame.f_back
    while inner is not None and inner.f_code.co_filename.startswith((*_COMMUNICATES, *_GLUE)):
        if inner.f_code.co_filename.startswith(_COMMUNICATES):
            found = found if inner.f_code.co_name in _WRAPPERS else inner
        inner = inner.f_back
    room = "meshwright.comm" if found.f_code.co_filename.startswith(_OURS) else "torch.distributed"
    return f"{found.f_code.co_name} of {room}"


class Watchdog:
    """Watches for one `FailureMonitor`, from its construction to `stop`."""

    def __init__(self, monitor: FailureMonitor, end: Callable[[BaseException], object]) -> None:
        """Start to watch; ``end`` is called with the error that is to end the process."""
        self._monitor = monitor
        self._end = end
        self._calls = CallWatch(monitor.ranks.is_watched)
        self._neighbors = _Neighbors()
        self._stillness = Stillness()
        self._silent_since: float | None = None
        self._known_since: float | None = None
        self._has_told = False
        self._renewed: float | None = None
        """The time of the last renewal of the lease."""
        self._stopped_at: float | None = None
        """The time at which the groups of devices were aborted."""
        self._under_way: StuckCall | Flight | None = None
        """The call or operation that the last look has found, the one that began first."""
        self._inquiry: threading.Thread | None = None
        self._given_up: tuple[StuckCall | Flight, float, CommunicationError] | None = None
        """The call that this rank has given up itself, when, and why."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._neighbors.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._neighbors.close()
        if self._renewed is not None:
            faulthandler.cancel_dump_traceback_later()

    def _renew(self) -> None:
        now, limit = time.monotonic(), self._monitor.limit
        if self._renewed is None and not groups_to_abort():
            return
        if now - (self._renewed or 0.0) >= RENEW_EVERY:
            self._renewed = now
            seconds = LEASE if limit is None else min(LEASE, limit + UNSEEN)
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _run(self) -> None:
        while True:
            self._neighbors.wait(EVERY)
            if self._stop.is_set():
                return
            try:
                self._renew()
                self._look()
            except Exception:  # without this thread, ranks would hang silently
                _log.exception("rank %d: a look at its neighbors failed", self._monitor.rank)

    def _look(self) -> None:
        for rank in self._neighbors.ended(self._monitor):
            # Not here: a request may wait for a store that is silent, and this thread watches it.
            self._monitor.board.later(partial(self._monitor.found_ended, rank))
        self._look_at_store()
        call = self._calls.look()
        # Negative: the numbers of waits of ours are not.
        stuck = None if call is None else Waiting(what=str(call), number=-call.number)
        self._monitor.ranks.stuck = stuck
        if PROCESS.stopped is not None:
            self._look_at_stop(PROCESS.stopped, call)
            return
        found = [each for each in (call, PROCESS.flights.oldest()) if each is not None]
        self._under_way = min(found, key=lambda each: each.since, default=None)
        self._look_at_call(self._under_way)

    # ---------------------------------------------------------------- the store's host

    def _look_at_store(self) -> None:
        """Give up on the store when its host has ended, or has been idle for long."""
        monitor, board = self._monitor, self._monitor.board
        silence = board.silence
        if board.lost is not None or silence < SILENT_AFTER:
            self._silent_since = None
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since, self._stillness = now, Stillness()
        look = None if board.host == STORE else monitor.ranks.look_at(board.host)
        limit = STILL if monitor.limit is None else min(STILL, monitor.limit)
        if look is None:
            limit = UNSEEN if monitor.limit is None else monitor.limit
            if silence >= limit:
                board.give_up(f"it has not answered for {silence:.0f} s (stopped, or cut off)")
        elif look.state == "":
            board.give_up("its process has ended")
        elif self._stillness.take(look, now) >= limit - SILENT_AFTER:
            why = "is stopped by a signal" if look.is_stopped else "does nothing"
            board.give_up(
                f"it does not answer (stopped, killed or cut off): its process {why}, and the "
                f"store has not answered for {silence:.0f} s"
            )
            monitor.fence(board.host)

    # ---------------------------------------------------------------- calls outside of ours

    def _look_at_call(self, call: StuckCall | Flight | None) -> None:
        monitor, now = self._monitor, time.monotonic()
        trouble = monitor.trouble
        if trouble is not None:
            self._look_at_trouble(trouble, call, now)
            return
        self._known_since, self._has_told = None, False
        if call is None or now - call.since < self._ask_after(call):
            return
        if self._given_up is not None and self._given_up[0] == call:
            if now - self._given_up[1] >= END_AFTER:
                self._give_up(self._given_up[2])
            return
        if self._inquiry is None or not self._inquiry.is_alive():
            self._inquiry = threading.Thread(
                target=self._inquire, args=(call,), name="meshwright-inquiry", daemon=True
            )
            self._inquiry.start()

    def _ask_after(self, call: StuckCall | Flight) -> float:
        """Return after how many seconds ranks are asked; for operations, as in our own waits."""
        if isinstance(call, StuckCall):
            return self._monitor.hang_after
        limit = call.communicator.timeout
        after = min(self._monitor.hang_after, MISMATCH_AFTER)
        return after if limit is None else min(after, limit)

    def _look_at_trouble(
        self, trouble: RankFailedError, call: StuckCall | Flight | None, now: float
    ) -> None:
        """Log another rank's failure once; give up when ``call`` has been blocked for too long."""
        monitor = self._monitor
        if self._known_since is None:
            self._known_since = now
        known = now - self._known_since
        patience = RECOVER_AFTER if monitor.ending is None else END_AFTER
        if call is not None and min(known, now - call.since) >= patience:
            text = f"{trouble}; rank {monitor.rank} was in {call}"
            if monitor.ending is None and groups_to_abort():
                why = f"it had failed, and rank {monitor.rank} cannot go on"
                lost = Failure(rank=trouble.rank, by=monitor.rank, error=why)
                monitor.board.later(lambda: monitor.post_failure(lost))
            self._give_up(RankFailedError(text, trouble.rank))
        if known >= TELL_AFTER and not self._has_told and not monitor.has_raised:
            self._has_told = True
            where = "at work" if call is None else f"in {call}"
            _log.error("rank %d is %s: %s", monitor.rank, where, trouble)

    def _inquire(self, call: StuckCall | Flight) -> None:
        """Treat ``call`` as a bounded wait; what ends it is put on the board for every rank."""
        monitor, limit = self._monitor, self._monitor.limit
        awaited: Awaited = OutsideCall(monitor, f"{call},")
        if isinstance(call, Flight):
            awaited = AwaitedOperation(call.communicator, call.issued, call.line)
            limit = call.communicator.timeout
        watch = BoundedWait(monitor, awaited, limit, first=0.0, since=call.since)
        try:
            while not self._stop.wait(EVERY):
                if self._under_way != call:
                    return
                watch.look()
        except CommunicationError as error:  # it stands on the board now
            self._given_up = call, time.monotonic(), error
            # A rank that has raised may handle that and come: then nothing need be aborted.
            if isinstance(call, Flight) and not isinstance(error, RankFailedError):
                self._give_up(error)

    # ---------------------------------------------------------------- the end

    def _give_up(self, error: CommunicationError) -> None:
        """Abort the groups of this rank's devices, or end the process if there are none."""
        groups = groups_to_abort()
        if not groups:
            self._end(error)
        elif PROCESS.stopped is None:
            # First: what an abort ends leaves no numbers to continue with.
            PROCESS.stopped = error
            self._stopped_at = time.monotonic()
            recorded = recorded_operations(RECORDED)
            last = f"; c10d's flight recorder: {', '.join(recorded)}" if recorded else ""
            rank, count = self._monitor.rank, len(groups)
            _log.error("rank %d aborts its %d device groups: %s%s", rank, count, error, last)
            threading.Thread(
                target=abort_together,
                args=(groups, ABORT_WITHIN),
                name="meshwright-aborts",
                daemon=True,
            ).start()

    def _look_at_stop(self, error: CommunicationError, call: StuckCall | None) -> None:
        """End the process if the program does not get to raise ``error``."""
        if PROCESS.has_refused and call is None:
            return
        is_slow = PROCESS.has_refused or not self._calls.stands_still
        since = self._stopped_at or 0.0
        if time.monotonic() - since >= (RECOVER_AFTER if is_slow else END_AFTER):
            self._end(error)


class _Neighbors:
    """Processes of other ranks on this host, by descriptors that signal their end.

    They are waited for, not polled: a launcher kills all other ranks within a tenth of a second,
    and which ended first would be unknown.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._known: set[int] = set()
        self._ended: dict[int, None] = {}
        """In the order in which they were found."""
        self._reading, self._writing = os.pipe()
        self._poll.register(self._reading, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until one ends, `wake` is called, or ``seconds`` have gone."""
        for descriptor, _ in self._poll.poll(1000 * seconds):
            if descriptor in self._rank_of:
                self._ended[self._rank_of.pop(descriptor)] = None
                self._poll.unregister(descriptor)
                os.close(descriptor)

    def wake(self) -> None:
        """End a `wait`, and all that follow."""
        os.write(self._writing, b".")

    def ended(self, monitor: FailureMonitor) -> list[int]:
        """List those that have ended and have not said why."""
        for rank, process in list(monitor.ranks.processes.items()):
            if rank in self._known or rank == monitor.rank:
                continue
            self._known.add(rank)
            if not process.is_visible or process.pid == os.getpid():
                continue
            try:
                descriptor = os.pidfd_open(process.pid)
            except (AttributeError, OSError):
                descriptor = -1
            # Asked after the open: the number may have gone to another process before it.
            if not process.has_ended and descriptor >= 0:
                self._rank_of[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)
                continue
            if process.has_ended:
                self._ended[rank] = None
            if descriptor >= 0:
                os.close(descriptor)
        if monitor.ending is not None:
            return []
        return [rank for rank in self._ended if rank not in monitor.ranks.left]

    def close(self) -> None:
        for descriptor in [*self._rank_of, self._reading, self._writing]:
            os.close(descriptor)
        self._rank_of.clear()
        self._poll = select.poll()
