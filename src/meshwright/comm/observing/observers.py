"""Observers of the collectives of a process: the protocol, a recorder, and a timer.

Attach them with ``with observe(recorder):``. Without observers a collective has no overhead.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from meshwright.comm.streams import Clock, Mark
from meshwright.timeline import Collective, Event, Lane, Timeline

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator


class Observer(Protocol):
    """Receives collectives, in the order in which this rank issues them."""

    def issued(self, collective: Collective) -> None:
        """Called when ``collective`` is about to run."""

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        """Called when ``collective``, issued at ``start``, was waited for and ended at ``end``."""


@runtime_checkable
class SpanObserver(Protocol):
    """Receives spans of compute, too: the phases of a trainable."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Name the work in the block."""


@runtime_checkable
class ActionObserver(Protocol):
    """Receives actions of a schedule, too."""

    def ran(self, name: str, lane: Lane, category: str, start: Mark, end: Mark) -> None:
        """Called when an action of kind ``category`` ran between two marks."""


class Recorder:
    """Keeps every collective that this rank issues, in order.

    >>> with observe(recorder := Recorder()):
    ...     loss.backward()
    >>> recorder.kinds()
    [('all_reduce', 'reduce bucket 0'), ('all_reduce', 'reduce bucket 1')]
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    def issued(self, collective: Collective) -> None:
        """Keep ``collective``."""
        self.collectives.append(collective)

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        """Do nothing: order and contents are known when a collective is issued."""

    def kinds(self) -> list[tuple[str, str]]:
        """Kind and label of each collective, in order."""
        return [(c.kind, c.label) for c in self.collectives]

    def bytes(self) -> int:
        """Sum the bytes of all recorded tensors on this rank."""
        return sum(c.bytes for c in self.collectives)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.collectives.clear()


@dataclass(frozen=True, slots=True)
class _Span:
    """A collective, or a named piece of compute, between two marks."""

    what: Collective | str
    lane: Lane
    start: Mark
    end: Mark
    category: str = ""

    def event(self, rank: int) -> Event:
        start, end = self.start.seconds(), self.end.seconds()
        if isinstance(self.what, Collective):
            return Event.of(self.what, rank=rank, start=start, end=max(start, end))
        return Event(
            name=self.what,
            lane=self.lane,
            rank=rank,
            start=start,
            end=max(start, end),
            category=self.category,
        )


class Timer:
    """Measures collectives, spans of compute and actions of schedules on one clock.

    A `Trainable` names its own spans: forward, backward and optimizer. Name others by `span`.

    A collective's event runs from its issue to the return of its wait, which is an upper bound when
    the wait comes late. ``keep`` bounds the number of events; the newest are kept.
    """

    def __init__(self, clock: Clock | None = None, keep: int | None = None) -> None:
        self.clock = clock or Clock()
        self._spans: deque[_Span] = deque(maxlen=keep)

    def issued(self, collective: Collective) -> None:
        """Do nothing: the start is taken when it is issued."""

    def completed(self, collective: Collective, start: Mark, end: Mark) -> None:
        """Keep the collective's span on its lane."""
        self._spans.append(_Span(collective, collective.lane, start, end))

    def ran(self, name: str, lane: Lane, category: str, start: Mark, end: Mark) -> None:
        """Keep an action of a schedule."""
        self._spans.append(_Span(name, lane, start, end, category))

    @contextlib.contextmanager
    def span(self, name: str, lane: Lane = "compute") -> Iterator[None]:
        """Measure the block as one event called ``name``."""
        start = self.clock.mark()
        try:
            yield
        finally:
            self._spans.append(_Span(name, lane, start, self.clock.mark()))

    def clear(self) -> None:
        """Forget what was measured."""
        self._spans.clear()

    def timeline(self, rank: int) -> Timeline:
        """Return the measurements as events of ``rank``, in seconds of the timer's clock."""
        return Timeline(events=tuple(span.event(rank) for span in self._spans))


def gather_timeline(timer: Timer, communicator: Communicator) -> Timeline:
    """Gather the measurements of all ranks of ``communicator``, which call this together.

    Events have the world's numbers of the ranks. Clocks of one machine agree; others do not.
    """
    mine = timer.timeline(communicator.ranks[communicator.rank])
    answers = communicator.gather_bytes(mine.to_json().encode(), label="timelines")
    return Timeline().merge(Timeline.from_json(answer.decode()) for answer in answers)
