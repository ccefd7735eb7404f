"""Measured timelines of a schedule: its order, its costs, its bubble.

A timeline of pipelined steps names its events after their actions, so the schedule that ran can be
recovered, and simulated with the measured costs. Where the two differ, time is spent on something
that the schedule does not explain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.schedule.actions import (
    REDUCE_GRAD,
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
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate
from meshwright.timeline import Event, Timeline

_COMPUTE = ("F", "B", "I", "W")

Edges = Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step, measured and simulated, with the rank numbers of the measured timeline."""

    measured: Timeline
    simulated: Timeline
    bubble: float
    """The idle share of the ranks' time, from the first to the last compute action."""
    simulated_bubble: float
    peaks: tuple[float, ...]
    """For each rank, the simulated maximum of microbatches whose activations it holds."""


def compare(timeline: Timeline, edges: Edges | None = None) -> Comparison | None:
    """Compare the last step of ``timeline`` with a simulation of its schedule at its costs.

    ``edges`` are those between stages; without them each stage feeds the next. None without
    compute actions of all stages. Raises `ScheduleError` for a schedule that cannot have run.
    """
    step = last_step(timeline)
    schedule = schedule_of(step, edges)
    if schedule is None:
        return None
    ranks = _ranks(step)
    found = simulate(lower(schedule), costs_of(step, schedule))
    events = (replace(e, rank=ranks[e.rank]) for e in found.timeline.events if e.duration)
    simulated = Timeline(events)
    return Comparison(step, simulated, bubble(step), bubble(simulated), found.peaks)


def bubble(timeline: Timeline) -> float:
    """Compute the idle share of the ranks' time, from the first to the last compute action."""
    actions = [event for event in timeline.events if _is_compute(event)]
    if not actions:
        return 0.0
    whole = max(e.end for e in actions) - min(e.start for e in actions)
    busy = Timeline(actions)
    ranks = busy.ranks
    computing = sum(busy.busy(rank, "compute") for rank in ranks)
    return 1.0 - computing / (whole * len(ranks)) if whole else 0.0


def last_step(timeline: Timeline) -> Timeline:
    """Return the events of the last step; a rank begins a step when an action repeats."""
    begins: dict[int, float] = {}
    for rank in _ranks(timeline):
        seen: set[str] = set()
        for event in timeline.events:
            if event.rank == rank and _is_compute(event):
                if event.name in seen:
                    seen.clear()
                if not seen:
                    begins[rank] = event.start
                seen.add(event.name)
    if not begins:
        return timeline
    earliest = min(begins.values())
    return Timeline(
        event
        for event in timeline.events
        if event.start >= begins.get(event.rank, earliest)
        or (not _is_compute(event) and event.start >= earliest)
    )


def schedule_of(timeline: Timeline, edges: Edges | None = None) -> Schedule | None:
    """Recover the schedule of one step from its compute actions; None without actions of all."""
    ranks = _ranks(timeline)
    rows: dict[int, list[Action]] = {rank: [] for rank in ranks}
    for event in timeline.events:
        if _is_compute(event):
            rows[event.rank].append(Action.parse(event.name))
    holders = {a.stage: number for number, rank in enumerate(ranks) for a in rows[rank]}
    if not holders or sorted(holders) != list(range(len(holders))):
        return None
    count = 1 + max(action.microbatch or 0 for row in rows.values() for action in row)
    listed = [holders[stage] for stage in range(len(holders))]
    return Schedule.of("measured", [rows[rank] for rank in ranks], listed, count, edges)


def costs_of(timeline: Timeline, schedule: Schedule) -> Costs:
    """Measure the costs of each stage's actions, in seconds.

    Medians; the minimum for transfers, where longer ones include the receiver's delay.
    """
    taken: dict[tuple[int, str], list[float]] = {}
    for event in timeline.events:
        action = _action(event)
        if action is not None and event.category != "recv":
            taken.setdefault((action.stage, str(action.operation)), []).append(event.duration)
    medians = {key: statistics.median(values) for key, values in taken.items()}

    def cost(operation: Operation) -> list[float]:
        return [medians.get((stage, str(operation)), 0.0) for stage in range(schedule.stages)]

    whole = cost(B)
    latencies = _latencies(timeline, schedule)
    sends = [
        min(latencies.get(s) or taken.get((s, "SEND_F")) or taken.get((s, "SEND_B")) or [0.0])
        for s in range(schedule.stages)
    ]
    return Costs(
        forward=cost(F),
        input=[i or b / 2 for i, b in zip(cost(I), whole, strict=True)],
        weight=[w or b / 2 for w, b in zip(cost(W), whole, strict=True)],
        transfer=sends,
        gather=cost(UNSHARD),
        reduce=cost(REDUCE_GRAD),
        activation=1.0 / max(1, len(schedule.stages_of(0))),
    )


def _latencies(timeline: Timeline, schedule: Schedule) -> dict[int, list[float]]:
    """By sending stage, the seconds from each of its sends to the end of the receive."""
    begun: dict[Action, float] = {}
    found: dict[int, list[float]] = {}
    for event in timeline.events:
        action = _action(event)
        if action is not None and event.category == "send":
            begun[action] = min(event.start, begun.get(action, event.start))
    for event in timeline.events:
        action = _action(event)
        if action is not None and event.category == "recv":
            for send in dependencies(action, schedule):
                if send in begun:
                    found.setdefault(send.stage, []).append(max(0.0, event.end - begun[send]))
    return found


def _ranks(timeline: Timeline) -> tuple[int, ...]:
    return tuple(sorted({event.rank for event in timeline.events if _is_compute(event)}))


def _is_compute(event: Event) -> bool:
    return event.lane == "compute" and event.category in _COMPUTE


def _action(event: Event) -> Action | None:
    """The action that ``event`` is named after, None for any other."""
    try:
        return Action.parse(event.name)
    except RuntimeError:
        return None
