"""Operations of devices between their call and their end, which the host does not wait for.

::

    the door ──> Flight ──launched──> its works tell ──the program waits──> an event behind that
                 (before the call)    of its end                            wait tells

A work keeps the memory of its tensors, so it is dropped as soon as the program has waited for it.
One thread asks, now and then; none asks while a CUDA graph is captured, since a query would end the
capture, and operations that are captured are not noted.
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
    """An operation of a device that is under way."""

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
        """Take the works that were started; a batch adds its work to the list at its end."""
        self._works = works
        if isinstance(works, tuple) and not works:  # c10d has made the current stream wait
            self.waited(record(self.communicator.device))

    def waited(self, end: DeviceEvent) -> None:
        """Take the event behind the stream's wait for it, in place of its works."""
        self._end, self._works = end, ()

    def ended(self) -> None:
        """Note that it has ended, or was never begun."""
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
    """All operations of this process's devices that are under way, by their groups."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Flight]] = {}
        self._captured_on: object = None
        """The stream on which an operation was captured last."""

    def begin(self, communicator: Communicator, issued: Issued, line: str) -> Flight | None:
        """Note an operation that is about to be called; None where a graph captures it."""
        if is_capturing(communicator.device):
            self._captured_on = current_stream(communicator.device)
            return None
        flight = Flight(communicator, issued, line)
        self._queues.setdefault(communicator.name, deque()).append(flight)
        return flight

    def oldest(self) -> Flight | None:
        """Drop what has ended; return what has been under way for longest, if anything.

        For one thread alone; others may call `begin` meanwhile.
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
