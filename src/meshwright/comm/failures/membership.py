"""A rank's membership in a run, from joining to leaving.

A member is watched, publishes the exception that ends it, and leaves with the others: closing its
connections while another rank still finishes an operation would look like a failure there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist

from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.liveness import Answers
from meshwright.comm.failures.status import is_the_users, one_line, source_line
from meshwright.comm.failures.store import STORE, Gathering
from meshwright.comm.failures.waiting import AllOthers, BoundedWait, blame, chain_of
from meshwright.comm.failures.watchdog import Watchdog
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import CommunicationError, RankFailedError

_log = logging.getLogger("meshwright")

LEAVE_TIMEOUT = 10.0
"""Seconds that a rank which is done waits for the others before it closes its connections."""

LINGER = 5.0
"""Seconds that the store of a failed run stays, at most, for others to read who failed first."""

TRACEBACK = "MESHWRIGHT_TRACEBACK"
"""The environment variable that, set to "full", leaves tracebacks as they are."""

FOLLOWS_BY = 60
"""Seconds by which a rank that ended because of another is dated later than it ended."""


def enter(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    hang_after: float,
    limit: float | None,
    host: int = STORE,
) -> FailureMonitor:
    """Watch this rank, and those of its host, from now on."""
    monitor = FailureMonitor(store, rank, world_size, hang_after=hang_after, limit=limit, host=host)
    PROCESS.monitor, PROCESS.watcher = monitor, Watchdog(monitor, end_process)
    return monitor


def resign() -> None:
    """Stop this rank's watchdog and monitor without telling the others."""
    monitor, watcher = PROCESS.monitor, PROCESS.watcher
    PROCESS.monitor = PROCESS.watcher = None
    if watcher is not None:
        watcher.stop()
    if monitor is not None:
        monitor.stop()


def leave() -> bool:
    """End the membership; returns whether all ranks have ended theirs together, in order.

    Raises `RankFailedError` for a lost rank, unless this rank has raised for it already.
    """
    monitor = PROCESS.monitor
    if monitor is None or monitor.pid != os.getpid():  # a process that was forked is no rank
        return True
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        _tell(monitor, error)
    is_clean, had_raised = False, monitor.has_raised
    with contextlib.suppress(RankFailedError):  # it stands in `ending`
        monitor.read()
        is_clean = not had_raised and leave_together(monitor)
    if not is_clean:
        with contextlib.suppress(RankFailedError):
            monitor.ranks.leave()
            monitor.ranks.gone.come()  # ranks that leave in order need not wait for this one
            if monitor.rank == 0:
                _erased(monitor).come()  # nor for keys that it does not erase
            _linger(monitor)
    ending = None if had_raised or is_clean else monitor.ending
    resign()
    if ending is not None and ending.rank == monitor.rank:  # the others raise
        _log.warning("%s", ending)
    elif ending is not None:
        raise RankFailedError(f"{ending}; rank {monitor.rank} had finished without it", ending.rank)
    return is_clean


def end_process(error: BaseException) -> None:
    """End this process for ``error`` now, with status 1, skipping the interpreter's shutdown."""
    PROCESS.monitor = None  # the others know: the hook called next must not tell them again
    sys.excepthook(type(error), error, None)  # for whoever listens, as it is not raised
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(1)


# -------------------------------------------------------------------------- leaving


class _End(AllOthers):
    """The end of the run, where all ranks arrive, as a `BoundedWait` sees it."""

    lacks = "has not come to it"

    def __init__(self, monitor: FailureMonitor) -> None:
        super().__init__(monitor, "the end of the run")
        self._left = monitor.ranks.left

    def topic(self, answers: Answers) -> str:
        return self.describe()

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        return bool(answer["leaving"]) or rank in self._left


def leave_together(monitor: FailureMonitor) -> bool:
    """Wait until every rank is done; the store's host waits until the others have seen that.

    Ranks that do not host the store wait at most `LEAVE_TIMEOUT` seconds. Returns whether all came.
    """
    ranks, rank, clock = monitor.ranks, monitor.rank, monitor.clock
    ranks.read_left()
    for other, when in sorted(ranks.left.items()):
        seconds = clock.wall() - when
        if seconds > LEAVE_TIMEOUT:
            _log.warning("rank %d left the run %.0f s before rank %d", other, seconds, rank)
    monitor.ranks.leave()
    begun, is_host = clock.now(), monitor.board.host == rank
    with BoundedWait(monitor, _End(monitor), None) as watch:
        while not ranks.end.wait(watch.pause):
            if monitor.ending is not None:
                ranks.end.close("a failure")
                return False
            if not is_host and clock.now() - begun > LEAVE_TIMEOUT:
                ranks.read_left()
                missing = [r for r in range(monitor.world_size) if r not in ranks.left]
                _log.info("rank %d leaves the run before ranks %s", rank, missing)
                return False
            watch.look()
    with contextlib.suppress(RankFailedError):  # who hosts the store may have gone before
        monitor.read()
        if monitor.ending is not None:  # who has raised comes to the end, too, but says so before
            return False
        ranks.gone.come()
        if is_host or rank == 0:
            _wait_for(monitor, ranks.gone, LEAVE_TIMEOUT)
        if rank == 0:
            monitor.board.look = None
            monitor.erase()
            _erased(monitor).come()
        _wait_for(monitor, _erased(monitor), 1.0)
    return True


def _erased(monitor: FailureMonitor) -> Gathering:
    """The barrier where rank 0 arrives when it has erased the run's keys."""
    return Gathering(monitor.board, f"erased/{monitor.ranks.run}", 1)


def _linger(monitor: FailureMonitor) -> None:
    """If this process hosts the store, keep it until the others have read who failed."""
    if monitor.board.host != monitor.rank or monitor.failure is None:
        return

    def is_reading(rank: int) -> bool:
        is_gone = rank in monitor.ranks.left or monitor.ranks.has_ended(rank)
        return not is_gone and str(rank) not in heard

    until, pause = monitor.clock.now() + LINGER, 0.01
    heard = set[str]()
    while any(map(is_reading, monitor.others)) and monitor.clock.now() < until:
        monitor.clock.sleep(pause)
        pause = min(pause * 1.5, monitor.board.every)
        monitor.ranks.read_left()
        heard.update((monitor.board.get("heard") or "").split())


def _wait_for(monitor: FailureMonitor, ranks: Gathering, seconds: float) -> None:
    until = monitor.clock.now() + seconds
    while (left := until - monitor.clock.now()) > 0 and not ranks.wait(left):
        pass


# -------------------------------------------------------------------------- last words


def _tell(monitor: FailureMonitor, error: BaseException) -> None:
    """Publish the ``error`` that ends this rank, or add to it which rank failed first."""
    first = blame(monitor, error)
    if first:
        monitor.has_raised = True
        error.add_note(first)
    elif not monitor.has_raised or not isinstance(error, CommunicationError):
        monitor.end(error)


def record_failure(error: BaseException) -> None:
    """Write ``error`` to the file that the launcher reads, if there is one.

    An error caused by another rank's gets a time later than any original error can have, because
    torchrun takes the earliest as the first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    later = FOLLOWS_BY if isinstance(error, RankFailedError) else 0
    where = source_line(error)
    # What torchrun calls the traceback; this rank has printed its own.
    said = f"{one_line(error)} ({where})" if where else one_line(error)
    trace = "\n".join((said, *getattr(error, "__notes__", ())))
    if os.environ.get(TRACEBACK) == "full":
        trace = "".join(traceback.format_exception(error))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time()) + later)},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _brief(monitor: FailureMonitor, error: BaseException) -> BaseException:
    """Fold the frames of ``error``; refer to the rank that raised the same first, if any."""
    with contextlib.suppress(RankFailedError):
        monitor.read()
    first = monitor.failure
    if first is not None and first.rank != monitor.rank and first.error == one_line(error):
        text = f"rank {first.rank} raised the same {type(error).__name__} first"
        return RankFailedError(text, first.rank).with_traceback(_folded(error))
    frames = sum(1 for _ in traceback.walk_tb(error.__traceback__))
    for each in chain_of(error):
        each.with_traceback(_folded(each))
    folded = frames - sum(1 for _ in traceback.walk_tb(error.__traceback__))
    if folded:
        error.add_note(f"({folded} frames inside of libraries folded; {TRACEBACK}=full shows them)")
    return error


def _folded(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` without frames of torch and this library, except the last."""
    traces: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for number, each in enumerate(reversed(traces)):
        if not number or is_the_users(each.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


class ExceptionHook:
    """Publishes an exception that ends this process, before Python prints it."""

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: object) -> None:
        """Tell the other ranks and the launcher, then call the previous hook.

        It gets the traceback without frames of torch and this library, or one line on a rank that
        raised the same as another rank before it; ``MESHWRIGHT_TRACEBACK=full`` keeps everything.
        """
        monitor = PROCESS.monitor
        if monitor is None or monitor.pid != os.getpid():
            record_failure(error)
            self.before(kind, error, trace)
            return
        _tell(monitor, error)
        if os.environ.get(TRACEBACK) != "full":
            error = _brief(monitor, error)
        record_failure(error)
        self.before(type(error), error, error.__traceback__)

    @classmethod
    def install(cls) -> None:
        """Install it in front of the current hook."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)

    @classmethod
    def remove(cls) -> None:
        """Restore the previous hook."""
        if isinstance(sys.excepthook, cls):
            sys.excepthook = sys.excepthook.before
