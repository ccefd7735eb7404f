"""The order of work on a simulated device: streams, events, and host threads.

Each has a vector clock (Lamport 1978; Fidge 1988): for every line of work, how much of it has ended
before the next work here. Work that a host thread launches on a stream is ordered after everything
the thread knows of; the thread knows nothing of the stream until it waits for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

_NUMBERS = itertools.count()


class Stamp(NamedTuple):
    """The position of one piece of work on its line."""

    line: int
    count: int


class WorkLine:
    """A sequence of work: a stream of the device, or a host thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_NUMBERS)
        self._clock: dict[int, int] = {self.number: 0}

    def __repr__(self) -> str:
        return self.name

    def advance(self) -> Stamp:
        """Add one piece of work."""
        self._clock[self.number] += 1
        return Stamp(self.number, self._clock[self.number])

    def comes_after(self, stamp: Stamp) -> bool:
        """Check whether the next work here begins after the work at ``stamp`` has ended."""
        return self._clock.get(stamp.line, 0) >= stamp.count

    def snapshot(self) -> dict[int, int]:
        """Copy the clock, for an event."""
        return dict(self._clock)

    def wait_until(self, clock: dict[int, int]) -> None:
        """Order the next work here after everything that ``clock`` knows of."""
        for line, count in clock.items():
            if count > self._clock.get(line, 0):
                self._clock[line] = count

    def wait_for(self, other: WorkLine) -> None:
        """Order the next work here after everything queued on ``other`` so far."""
        self.wait_until(other._clock)


@dataclass(slots=True)
class SimulatedEvent:
    """A point of a stream, which the device passes some time after the host recorded it."""

    name: str
    clock: dict[int, int]
    passes_at: int
    """A time of `DeviceTime`."""


Event = SimulatedEvent
"""The name that torch looks up in a device's module."""


class DeviceTime:
    """The time of a device that lags behind the host: it advances with every host operation."""

    def __init__(self, lag: int) -> None:
        """``lag`` is the number of host operations until the device reaches what is queued."""
        self.now = 0
        self._lag = lag

    def arrival(self) -> int:
        """Return the time at which the device reaches what is queued now."""
        return self.now + self._lag
