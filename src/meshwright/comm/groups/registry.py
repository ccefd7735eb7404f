"""The state of communication in this process: communicators, observers, phases, the monitor, pages.

All process-wide state is kept here; only the compiler has its own object. Communicators are keyed
weakly by their c10d group, so that a destroyed group takes its communicator with it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from meshwright.comm.groups.in_flight import Flights
from meshwright.comm.memory.pages import PagePool
from meshwright.comm.observing.observers import ActionObserver, Observer, SpanObserver
from meshwright.comm.streams import Mark
from meshwright.errors import CommunicationError
from meshwright.timeline import Lane

if TYPE_CHECKING:
    from meshwright.comm.c10d.checking import CallChecks
    from meshwright.comm.collectives import Communicator
    from meshwright.comm.failures.failure import FailureMonitor
    from meshwright.comm.failures.watchdog import Watchdog
    from meshwright.comm.graphs.marks import MarkedModel
    from meshwright.comm.graphs.units import TracedRoot

_log = logging.getLogger("meshwright")


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """The current phase of this rank: its name, and the step if there is one."""

    name: str
    step: int | None
    excused_until: float = 0.0
    """Until when (on the monotonic clock) other ranks keep waiting for this one."""

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name}, step {self.step}"


class Outstanding(Protocol):
    """A check whose answer has not arrived yet."""

    def settle(self) -> None:
        """Wait for the answer, and raise the error that it means, if any."""


@dataclass(slots=True)
class ProcessState:
    """The communication state of this process. There is one, `PROCESS`."""

    communicators: MutableMapping[Any, Communicator] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """One communicator for each c10d process group, which is not kept alive."""
    idle_waiters: list[Any] = field(default_factory=list)
    """Threads that have waited for a transfer and may wait for the next; see `pending`."""
    one_as_many: bool = False
    """See `size_one_as_many`."""
    observers: list[Observer] = field(default_factory=list)
    """Objects that are told of every collective; without any, telling costs nothing."""
    phases: list[PhaseRecord] = field(default_factory=list)
    """The phases that the main thread is in, outermost first."""
    monitor: FailureMonitor | None = None
    """Publishes this rank's failure and answers for it; None before `connect`."""
    watcher: Watchdog | None = None
    """Watches this process and its neighbors, as long as there is a monitor."""
    issuers: set[int] = field(default_factory=set)
    """Threads that have issued operations, by their numbers."""
    flights: Flights = field(default_factory=Flights)
    """Operations of devices that are under way."""
    stopped: CommunicationError | None = None
    """The error that all communication raises since the groups of devices were aborted."""
    has_refused: bool = False
    """True when `refuse` has raised that error in the program."""
    layouts: MutableMapping[Any, Any] = field(default_factory=weakref.WeakValueDictionary)
    """Specs of the DTensors that exist, each kept alive by its DTensors alone; see `dtensor`."""
    pages: PagePool = field(default_factory=PagePool)
    """Pages of reusable storage."""
    marked: MutableMapping[str, MarkedModel] = field(default_factory=weakref.WeakValueDictionary)
    """Models whose gradients are marked in traced graphs, by the name that their marks carry."""
    roots: MutableMapping[str, TracedRoot] = field(default_factory=weakref.WeakValueDictionary)
    """Roots whose units graphs drive, by the name that their operators carry."""
    drawn: dict[Any, set[Any]] = field(default_factory=dict)
    """For each mesh the sets of its dims along which ranks were asked for one random state. Meshes
    are held, so that equal ones are known alike on all ranks."""
    reducers: MutableMapping[Any, None] = field(default_factory=weakref.WeakKeyDictionary)
    """The reducers of replicas, in the order in which they were made."""
    root_numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the names of ``roots``."""
    checks: CallChecks | None = None
    """Compares every call with those of the other ranks; None unless requested."""
    outstanding: dict[str, Outstanding] = field(default_factory=dict)
    """Deferred checks of values that a device had not computed yet, in the order recorded."""
    saving: Any = None
    """The save in the background, at most one, with methods ``look``, ``wait`` and ``leave``."""
    groups_made: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """The number of groups that this process has made of these ranks of the world, in its run."""
    runs_met: Counter[str] = field(default_factory=Counter)
    """The number of runs that this process has joined or tried to, by the address of the store."""
    held: dict[str, Any] = field(default_factory=dict)
    """Claims that this process holds against others until it leaves its run or ends, by name; each
    has a method ``release``."""
    holding: threading.RLock = field(default_factory=threading.RLock)
    """The lock for changes of ``held``; a fork waits for it."""

    @contextlib.contextmanager
    def size_one_as_many(self) -> Iterator[None]:
        """Treat axes of one rank, made in the block, as larger ones: gather, sum and compare.

        So one GPU can show what would be sent and waited for.
        """
        self.one_as_many = True
        try:
            yield
        finally:
            self.one_as_many = False

    def refuse(self) -> None:
        """Raise the error that ended this process's communication, if there is one."""
        if self.stopped is None:
            return
        self.has_refused = True
        if self.monitor is not None:
            self.monitor.has_raised = True
        # Raised many times: old tracebacks would pile up and keep the tensors of their frames.
        raise self.stopped.with_traceback(None)

    def name_group(self, ranks: tuple[int, ...]) -> str:
        """Name a group that ``ranks`` are about to make: equal on all of them, and never reused."""
        self.groups_made[ranks] += 1
        digest = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        return f"{digest}/{self.groups_made[ranks]}"

    def release(self) -> None:
        """Release resources, forget the run, and stop comparing calls."""
        self.groups_made.clear()
        self.drawn.clear()
        if self.checks is not None:
            self.checks.release()
        with self.holding:
            for held in self.held.values():
                held.release()
            self.held.clear()
        self.flights = Flights()

    def tell(self, event: Literal["issued", "completed", "ran"], *what: object) -> None:
        """Call the method ``event`` of all observers; remove one that raises."""
        for observer in tuple(self.observers):
            if event == "ran" and not isinstance(observer, ActionObserver):
                continue
            try:
                getattr(observer, event)(*what)
            except Exception:
                _log.exception(
                    "observer %r failed and is removed; the collectives continue", observer
                )
                with contextlib.suppress(ValueError):  # another thread may have removed it
                    self.observers.remove(observer)


PROCESS = ProcessState()
# Keys that leave it later ask classes of torch's for their hash, which the interpreter has cleared.
atexit.register(PROCESS.layouts.clear)


def go_on() -> None:
    """Start over on this rank: errors that it has raised before no longer end it."""
    if PROCESS.monitor is not None:
        PROCESS.monitor.go_on()


def hears_actions() -> bool:
    """Check whether any observer receives actions of a schedule."""
    return any(isinstance(observer, ActionObserver) for observer in PROCESS.observers)


def tell_ran(name: str, lane: Lane, category: str, start: Mark, end: Mark) -> None:
    """Tell observers that an action of a schedule ran between two marks."""
    PROCESS.tell("ran", name, lane, category, start, end)


@contextlib.contextmanager
def observe(*observers: Observer) -> Iterator[None]:
    """Tell ``observers`` of every collective of this process inside the block.

    An observer that raises is removed and logged; training continues.
    """
    PROCESS.observers.extend(observers)
    try:
        yield
    finally:
        for observer in observers:
            with contextlib.suppress(ValueError):
                PROCESS.observers.remove(observer)


class phase:  # noqa: N801 - it is used as a function: `with phase("forward", step=12):`
    """Name what this rank does inside the block, for reports about it.

    An exception that leaves a block, also a nested one, is published as this rank's failure, so
    that the other ranks stop within seconds and name this one. Entering the next outermost block
    withdraws that, and failures of other ranks that this one has raised do not end it once more.

    A rank may work without the others for a long time, for example on slow storage. Waits for it
    are bounded by ``limit`` (seconds) of its phase if that is longer than their own bound. A rank
    that does not answer at all is lost in any case. With ``math.inf`` other ranks wait without
    logging it. A phase that ``computes`` is a span on the compute lane of observers that measure
    (`SpanObserver`).
    """

    __slots__ = ("_computes", "_limit", "_record", "_spans")

    def __init__(
        self, name: str, step: int | None = None, *, limit: float = 0.0, computes: bool = False
    ) -> None:
        self._record = PhaseRecord(name, step)
        self._limit = limit
        self._computes = computes
        self._spans: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if self._limit:
            self._record = replace(self._record, excused_until=time.monotonic() + self._limit)
        if not PROCESS.phases:
            go_on()
        PROCESS.phases.append(self._record)
        if self._computes and PROCESS.observers:
            self._spans = contextlib.ExitStack()
            for observer in PROCESS.observers:
                if isinstance(observer, SpanObserver):
                    self._spans.enter_context(observer.span(self._record.name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._spans is not None:
            self._spans.close()
            self._spans = None
        monitor = PROCESS.monitor
        if error is not None and monitor is not None and isinstance(error, Exception):
            monitor.publish(error)
        PROCESS.phases.pop()
