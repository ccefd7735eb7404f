"""Simulated duration and memory of a schedule, given the cost of each action.

Every rank has four lanes. ``compute`` follows the row, one action after another. Sends, gathers and
reductions start when the row reaches them, each kind in its own lane, one after another, and delay
only what needs their result. A receive ends when it is posted and the payload has arrived.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import (
    COMPUTE,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    B,
    F,
    I,
    Operation,
    Schedule,
    W,
    dependencies,
)
from meshwright.schedule.messages import parts_of
from meshwright.schedule.text import draw
from meshwright.timeline import Event, Timeline

PerStage = float | Sequence[float]
"""One value for all stages, or one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and sizes of the actions of one microbatch, for each stage."""

    forward: PerStage = 1.0
    input: PerStage = 1.0
    """Input half of the backward; a full backward takes this plus `weight`."""
    weight: PerStage = 1.0
    transfer: PerStage = 0.0
    """From a send to the end of its receive, by the stage that sends."""
    gather: PerStage = 0.0
    reduce: PerStage = 0.0
    activation: PerStage = 1.0
    """The memory of a stage for a microbatch from its forward to its W or B, in any unit."""
    deferred: PerStage | None = None
    """What of it is left between I and W; None: all of it."""
    parameters: PerStage = 0.0
    """The memory of a stage while it is gathered, in the same unit."""

    def held_between(self) -> PerStage:
        """The memory of a stage for a microbatch between I and W."""
        return self.activation if self.deferred is None else self.deferred

    @classmethod
    def shared(
        cls, chunks: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0
    ) -> Costs:
        """Divide the costs of a rank equally among its ``chunks`` stages."""
        return cls(
            forward=forward / chunks,
            input=input / chunks,
            weight=weight / chunks,
            activation=1.0 / chunks,
        )


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    Ranks are numbered as in the schedule; times are in the unit of the costs.
    """

    makespan: float
    """The end of the last action; the simulation starts at 0."""
    compute: tuple[float, ...]
    """The compute time of each rank."""
    peaks: tuple[float, ...]
    """The peak memory of each rank: activations and gathered parameters."""
    spans: tuple[float, ...]
    """The time of each rank from the start of its first action to the end of its last.

    The longest is the time of a step where ranks do not wait for each other between steps."""
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    """Compute actions, sends, gathers and reductions, with lanes; empty without ``events``."""

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle time of each rank."""
        return tuple(self.makespan - busy for busy in self.compute)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time."""
        whole = self.makespan * len(self.compute)
        return sum(self.bubbles) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None, *, events: bool = True) -> Simulation:
    """Run ``schedule``, compute-only or lowered, in simulated time.

    Without transfers, communication is free. Raises `ScheduleError` for a deadlock. Without
    ``events`` no timeline is made, and memory falls to a tenth.
    """
    return _Machine(schedule, costs or Costs(), events=events).run()


_COLUMN = {F: 0, I: 1, B: 1, W: 2, SEND_F: 3, SEND_B: 4, RECV_F: 5, RECV_B: 6, UNSHARD: 7}
_COLUMNS = 8
_LANES = ("compute", "transfer", "gather", "reduce")
_UNKNOWN = -1.0


class _Machine:
    """Simulates all ranks. ``_ends[stage * 8 + column][microbatch]`` is the end time of a result.

    Costs and dependencies are looked up once for each stage and operation: they are the same for
    all microbatches.
    """

    def __init__(self, schedule: Schedule, costs: Costs, *, events: bool) -> None:
        self._schedule = schedule
        self._costs = costs
        ranks, stages = schedule.ranks, schedule.stages
        blank = array("d", [_UNKNOWN]) * max(1, schedule.microbatches)
        self._ends = [blank[:] for _ in range(stages * _COLUMNS)]
        # When each lane is free, by rank.
        self._lanes = {name: [0.0] * ranks for name in _LANES}
        self._position = [0] * ranks
        self._part = [0] * ranks
        self._compute = [0.0] * ranks
        self._starts = [math.inf] * ranks
        self._held = [0.0] * ranks
        self._peaks = [0.0] * ranks
        self._waiting: dict[tuple[int, int], list[int]] = {}
        self._needs: dict[tuple[int, Operation], tuple[int, ...]] = {}
        self._events: list[Event] | None = [] if events else None
        present = {a.operation for row in schedule.rows for a in row if a is not None}
        self._has_transfers = bool(present & {RECV_F, RECV_B})
        self._has_gathers = UNSHARD in present
        # By stage and column. A full backward counts as its two halves.
        halves = (costs.forward, costs.input, costs.weight)
        taken = (*halves, costs.transfer, costs.transfer, 0.0, 0.0, costs.gather)
        self._seconds = [at_stage(each, stage) for stage in range(stages) for each in taken]

    def run(self) -> Simulation:
        ready = list(range(self._schedule.ranks))
        while ready:
            ready.extend(self._advance(ready.pop()))
        rows = self._schedule.rows
        stuck = {r: at for r, at in enumerate(self._position) if at < len(rows[r])}
        if stuck:
            raise ScheduleError(f"the schedule never ends:\n{draw(self._schedule, stuck)}")
        return Simulation(
            makespan=max((end for lane in self._lanes.values() for end in lane), default=0.0),
            compute=tuple(self._compute),
            peaks=tuple(self._peaks),
            spans=tuple(
                max(0.0, end - start)
                for end, start in zip(self._lanes["compute"], self._starts, strict=True)
            ),
            timeline=Timeline(self._events or ()),
        )

    # ------------------------------------------------------------------- one rank

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it waits or ends; returns the ranks that its results wake."""
        row, woken = self._schedule.rows[rank], list[int]()
        position, part_at = self._position[rank], self._part[rank]
        clock = self._lanes["compute"]
        while position < len(row):
            action = row[position]
            if action is None:
                position += 1
                continue
            if action.operation not in COMPUTE:
                self._post(rank, action, clock[rank], woken)
                position += 1
                continue
            parts = parts_of(action)
            while part_at < len(parts):
                start = self._start(rank, parts[part_at], clock[rank])
                if start < 0:
                    self._position[rank], self._part[rank] = position, part_at
                    return woken
                self._run_part(rank, parts[part_at], start, woken)
                part_at += 1
            part_at = 0
            position += 1
        self._position[rank], self._part[rank] = position, 0
        return woken

    def _start(self, rank: int, part: Action, free: float) -> float:
        """The start time of ``part``; negative, and the rank waits, while a result is unknown."""
        stage, operation, k, _ = part
        needs = self._needs.get((stage, operation))
        if needs is None:
            needs = self._needs[stage, operation] = tuple(self._columns(part))
        start, ends = free, self._ends
        for column in needs:
            at = k if column % _COLUMNS != 7 else 0
            end = ends[column][at or 0]
            if end < 0:
                self._waiting.setdefault((column, at or 0), []).append(rank)
                return _UNKNOWN
            if end > start:
                start = end
        return start

    def _columns(self, part: Action) -> Iterator[int]:
        """Yield the columns of the results that ``part`` needs and that the schedule has."""
        for need in dependencies(part, self._schedule):
            if need.operation in (RECV_F, RECV_B):
                if self._has_transfers:
                    yield need.stage * _COLUMNS + _COLUMN[need.operation]
                    for send in dependencies(need, self._schedule):
                        yield send.stage * _COLUMNS + _COLUMN[send.operation]
            elif need.operation is not UNSHARD or self._has_gathers:
                yield need.stage * _COLUMNS + _COLUMN[need.operation]

    def _run_part(self, rank: int, part: Action, start: float, woken: list[int]) -> None:
        stage, operation, k, _ = part
        seconds = self._seconds[stage * _COLUMNS + _COLUMN[operation]]
        if operation is B:
            seconds += self._seconds[stage * _COLUMNS + 2]
        end = start + seconds
        self._starts[rank] = min(self._starts[rank], start)
        self._lanes["compute"][rank] = end
        self._compute[rank] += seconds
        if operation is F:
            self._hold(rank, at_stage(self._costs.activation, stage))
        elif operation is B:
            self._hold(rank, -at_stage(self._costs.activation, stage))
        else:
            left = at_stage(self._costs.held_between(), stage)
            freed = left if operation is W else at_stage(self._costs.activation, stage) - left
            self._hold(rank, -freed)
        self._note(stage * _COLUMNS + _COLUMN[operation], k or 0, end, woken)
        if self._events is not None:
            self._events.append(self._event(rank, part, "compute", start, end))

    def _post(self, rank: int, action: Action, now: float, woken: list[int]) -> None:
        """Start an action that does not block the row."""
        stage, operation, k, _ = action
        if operation is RESHARD:
            self._hold(rank, -at_stage(self._costs.parameters, stage))
            return
        if operation is RECV_F or operation is RECV_B:
            self._note(stage * _COLUMNS + _COLUMN[operation], k or 0, now, woken)
            return
        if operation is REDUCE_GRAD:
            lane, seconds = "reduce", at_stage(self._costs.reduce, stage)
        elif operation is UNSHARD:
            lane, seconds = "gather", at_stage(self._costs.gather, stage)
            self._hold(rank, at_stage(self._costs.parameters, stage))
        else:
            lane, seconds = "transfer", at_stage(self._costs.transfer, stage)
            # The first part of an overlap ends before the row reaches the send.
            made = 0 if operation is SEND_F else 1
            now = self._ends[stage * _COLUMNS + made][k or 0]
        start = max(self._lanes[lane][rank], now)
        self._lanes[lane][rank] = end = start + seconds
        if operation is not REDUCE_GRAD:
            self._note(stage * _COLUMNS + _COLUMN[operation], k or 0, end, woken)
        if self._events is not None:
            self._events.append(self._event(rank, action, lane, start, end))

    def _note(self, column: int, at: int, end: float, woken: list[int]) -> None:
        self._ends[column][at] = end
        if self._waiting:
            woken += self._waiting.pop((column, at), ())

    def _hold(self, rank: int, size: float) -> None:
        self._held[rank] += size
        if self._held[rank] > self._peaks[rank]:
            self._peaks[rank] = self._held[rank]

    def _event(self, rank: int, action: Action, lane: str, start: float, end: float) -> Event:
        kind = str(action.operation)
        return Event(name=str(action), lane=lane, rank=rank, category=kind, start=start, end=end)


def at_stage(value: PerStage, stage: int) -> float:
    """The value of ``stage``."""
    return float(value) if isinstance(value, int | float) else float(value[stage])
