"""The order of work on a simulated device: streams, events, and the threads of the host.

Each has a vector clock (Lamport 1978; Fidge 1988): for every line of work, how much of it has ended
before whatever comes next here. What a thread of the host launches on a stream comes after all that
the thread knows of; the thread itself knows nothing of the stream until it has waited.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

_NUMBERS = itertools.count()


class Stamp(NamedTuple):
    """The place of one piece of work."""

    line: int
    count: int


class WorkLine:
    """Work in one order: a stream of the device, or a thread of the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_NUMBERS)
        self._clock: dict[int, int] = {self.number: 0}

    def __repr__(self) -> str:
        return self.name

    def advance(self) -> Stamp:
        """Do one more piece of work."""
        self._clock[self.number] += 1
        return Stamp(self.number, self._clock[self.number])

    def comes_after(self, stamp: Stamp) -> bool:
        """Check that what comes next here begins when the work at ``stamp`` has ended."""
        return self._clock.get(stamp.line, 0) >= stamp.count

    def snapshot(self) -> dict[int, int]:
        """Copy the clock, for an event."""
        return dict(self._clock)

    def wait_until(self, clock: dict[int, int]) -> None:
        """Begin what comes next here after all that ``clock`` knows of."""
        for line, count in clock.items():
            if count > self._clock.get(line, 0):
                self._clock[line] = count

    def wait_for(self, other: WorkLine) -> None:
        """Begin what comes next here after all that ``other`` has been given by now."""
        self.wait_until(other._clock)


@dataclass(slots=True)
class Event:
    """A point of a stream. The device passes it later than the host has recorded it."""

    name: str
    clock: dict[int, int]
    passes_at: int
    """In the time of the device."""


class DeviceTime:
    """The time of a device that is behind the host: it goes on with all that the host does."""

    def __init__(self, lag: int) -> None:
        """``lag`` is the number of things that the host does while the device does one."""
        self.now = 0
        self._lag = lag

    def go_on(self) -> None:
        """Count one more thing that happens."""
        self.now += 1

    def arrival(self) -> int:
        """Find when the device comes to what is queued now."""
        return self.now + self._lag
