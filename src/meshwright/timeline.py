"""Communication in time: collectives, events and timelines, measured or simulated.

::

    rank 0   compute   |##### forward #####|### backward ###|
             gather    |##|  |###|                           hidden behind compute: not exposed
             reduce                               |########|
                                                   ~~~~~~~~  busy; exposed after compute ends
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

from meshwright.precision import dtype_bytes

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send",
    "recv",
    "barrier",
]
"""The operations of a communicator."""

Lane = Literal["compute", "gather", "reduce", "transfer"]
"""The lanes of one rank, which can run at the same time."""

Interval = tuple[float, float]
"""Start and end in seconds."""

LANES: tuple[Lane, ...] = get_args(Lane)

LANE_OF_KIND: Mapping[str, Lane] = MappingProxyType(
    {
        "all_gather": "gather",
        "broadcast": "gather",
        "all_reduce": "reduce",
        "reduce_scatter": "reduce",
        "barrier": "reduce",
        "send": "transfer",
        "recv": "transfer",
        "all_to_all": "transfer",
    }
)

KINDS: tuple[str, ...] = tuple(LANE_OF_KIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operation of a communicator: what, over which axis, and why."""

    kind: str
    """A member of ``KINDS``."""
    axis: str
    """Name of the mesh axis it runs over."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor that this rank passes in (``recv`` and ``broadcast``: receives)."""
    dtype: str = "uint8"
    reduction: str | None = None
    """Such as ``"sum"``; ``None`` where nothing is reduced."""
    peer: int | None = None
    """The other rank of a transfer or the source of a broadcast, counted within the group."""
    label: str = ""
    """The reason for it, such as ``"unshard layers.3"``."""
    sequence: int = 0
    """The number of operations that this group issued before it on this rank."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensor passed in; 0 for a barrier."""
        return 0 if self.kind == "barrier" else math.prod(self.shape) * dtype_bytes(self.dtype)

    @property
    def lane(self) -> Lane:
        """The lane on which it is drawn."""
        return LANE_OF_KIND[self.kind]

    def __str__(self) -> str:
        """Format it, such as ``all_gather #42 "unshard layers.4" on axis shard``."""
        label = f' "{self.label}"' if self.label else ""
        peer = f" with peer {self.peer}" if self.peer is not None else ""
        return f"{self.kind} #{self.sequence}{label} on axis {self.axis}{peer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span of time on one lane of one rank."""

    name: str
    """The text that is drawn, such as ``"forward"`` or ``"unshard layers.3"``."""
    lane: str
    """A member of ``LANES``."""
    rank: int
    start: float
    """Seconds on a clock that all events of a timeline share."""
    end: float
    bytes: int = 0
    category: str = ""
    """The kind of work, such as ``"backward"`` or ``"all_gather"``."""
    axis: str = ""
    label: str = ""
    sequence: int | None = None
    """The number of the collective in its group."""

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise ValueError(f"expected a lane of {', '.join(LANES)}, found {self.lane!r}")
        if not (math.isfinite(self.start) and self.start <= self.end < math.inf):
            raise ValueError(
                f"expected finite times with start <= end for event {self.name!r} on rank "
                f"{self.rank}, found {self.start} to {self.end}"
            )

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @classmethod
    def of(cls, collective: Collective, *, rank: int, start: float, end: float) -> Event:
        """Make the event of a collective that ``rank`` issued at ``start``, done at ``end``."""
        return cls(
            name=collective.label or collective.kind,
            lane=collective.lane,
            rank=rank,
            start=start,
            end=end,
            bytes=collective.bytes,
            category=collective.kind,
            axis=collective.axis,
            label=collective.label,
            sequence=collective.sequence,
        )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """List the same times as disjoint intervals in order; touching ones are joined."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(disjoint: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in disjoint)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of one or several ranks, ordered by start."""

    events: tuple[Event, ...] = ()

    def __init__(self, events: Iterable[Event] = ()) -> None:
        ordered = sorted(events, key=lambda e: (e.start, e.rank, LANES.index(e.lane), -e.end))
        object.__setattr__(self, "events", tuple(ordered))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have events, in order."""
        return tuple(sorted({event.rank for event in self.events}))

    @property
    def start(self) -> float:
        """Seconds at which the first event begins; 0 without events."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        """Seconds at which the last event ends; 0 without events."""
        return max((event.end for event in self.events), default=0.0)

    def merge(self, others: Iterable[Timeline]) -> Timeline:
        """Combine the events of this timeline and ``others``; clocks are not adjusted."""
        return Timeline([*self.events, *(event for other in others for event in other.events)])

    def select(self, *, rank: int | None = None, lane: str | None = None) -> Timeline:
        """Select the events of one rank, of one lane, or of one lane of one rank."""
        return Timeline(
            event
            for event in self.events
            if (rank is None or event.rank == rank) and (lane is None or event.lane == lane)
        )

    def intervals(self, rank: int, *lanes: str) -> list[Interval]:
        """Find the times when at least one of ``lanes`` is busy on ``rank``: disjoint, in order."""
        return union((e.start, e.end) for e in self.events if e.rank == rank and e.lane in lanes)

    def busy(self, rank: int, lane: str) -> float:
        """Count the seconds in which ``lane`` of ``rank`` runs something; overlaps count once."""
        return _length(self.intervals(rank, lane))

    def exposed(self, rank: int) -> float:
        """Count the seconds in which ``rank`` communicates and computes nothing."""
        # The time in which any lane is busy, less that of computing.
        return _length(self.intervals(rank, *LANES)) - self.busy(rank, "compute")

    def bytes(self, rank: int, lane: str) -> int:
        """Count the bytes that the events of ``lane`` carry on ``rank``."""
        return sum(e.bytes for e in self.events if e.rank == rank and e.lane == lane)

    def to_json(self) -> str:
        """Write one line of JSON; ``from_json`` gives an equal timeline."""
        return json.dumps({"format": 1, "events": [asdict(event) for event in self.events]})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what ``to_json`` wrote; raises ``ValueError`` for anything else."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a timeline as JSON, found {error}") from error
        if not isinstance(document, dict) or document.get("format") != 1:
            raise ValueError('expected a timeline with "format": 1, found another document')
        records = document.get("events")
        if not isinstance(records, list):
            raise ValueError("expected a timeline with a list of events, found none")
        return cls(_event(number, record) for number, record in enumerate(records))


def _event(number: int, record: object) -> Event:
    if not isinstance(record, dict):
        raise ValueError(f"event {number} is not a record: {record!r}")
    if unknown := set(record) - {item.name for item in fields(Event)}:
        raise ValueError(f"event {number} has unknown fields {sorted(unknown)}")
    try:
        return Event(**record)
    except TypeError as error:
        raise ValueError(f"event {number} is not complete: {error}") from error
