"""Device operations between their call and their end, which the host does not wait for.

::

    the call ──> Flight ──launched──> its works show ──the program waits──> an event after that
                 (before it)          its end                               wait shows it

A work keeps the memory of its tensors alive, so it is dropped once the program has waited for it.
One thread queries, now and then, but not while a CUDA graph is captured, since a query would end
the capture; captured operations are not recorded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.comm.streams import DeviceEvent, captures, current_stream, is_capturing, record

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator
    from meshwright.comm.failures.waiting import Issued
    from meshwright.comm.pending import Work


class Flight:
    """A device operation in flight."""

    __slots__ = ("_end", "_works", "communicator", "is_over", "issued", "line", "since")

    def __init__(self, communicator: Communicator, issued: Issued, line: str) -> None:
        self.communicator = communicator
        self.issued = issued
        self.line = line
        """The user's line that led to the call; empty where there is none."""
        self.since = time.monotonic()
        """The time of the call, or at which those before it on its communicator had ended."""
        self.is_over = False
        self._works: Sequence[Work] = ()
        self._end: DeviceEvent | None = None

    def __str__(self) -> str:
        at = f", called at {self.line}" if self.line else ""
        return f"{self.issued.describe(self.communicator.axis)}{at}"

    def launched(self, works: Sequence[Work]) -> None:
        """Record the works that were started; a batch adds its work to the list at its end."""
        self._works = works
        if isinstance(works, tuple) and not works:  # c10d has made the current stream wait
            self.waited(record(self.communicator.device))

    def waited(self, end: DeviceEvent) -> None:
        """Replace its works by the event after the stream's wait for it."""
        self._end, self._works = end, ()

    def ended(self) -> None:
        """Record that it has ended, or never began."""
        self.is_over, self._works, self._end = True, (), None

    def has_ended(self) -> bool:
        if self.is_over or not self.communicator.is_open:
            return True
        end = self._end
        try:
            if end is not None:
                return end.query()
            return bool(self._works) and all(work.is_completed() for work in self._works)
        except RuntimeError:  # the device is broken: the program is told by its own next call
            return False


class Flights:
    """All device operations of this process in flight, by group."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Flight]] = {}
        self._captured_on: object = None
        """The stream on which an operation was captured last."""

    def begin(self, communicator: Communicator, issued: Issued, line: str) -> Flight | None:
        """Record an operation that is about to be called; None where a graph captures it."""
        if is_capturing(communicator.device):
            self._captured_on = current_stream(communicator.device)
            return None
        flight = Flight(communicator, issued, line)
        self._queues.setdefault(communicator.name, deque()).append(flight)
        return flight

    def oldest(self) -> Flight | None:
        """Drop what has ended; return the operation that has been in flight longest, if any.

        For use by one thread; others may call `begin` meanwhile.
        """
        heads: list[Flight] = []
        for queue in list(self._queues.values()):
            if queue and captures(queue[0].communicator.device, self._captured_on):
                return None
            while queue and queue[0].has_ended():
                queue.popleft().ended()
                if queue:  # its time counts from here: it could not run before
                    queue[0].since = max(queue[0].since, time.monotonic())
            heads += list(queue)[:1]
        return min(heads, key=lambda flight: flight.since, default=None)
