"""A schedule for given costs: list scheduling and local search, from the built schedules on.

An order of F and I of each rank is completed by the list scheduler, which puts weight halves where
a rank would idle or has no memory for the next forward. The orders of all built schedules are
completed so, and those of greedy ranks; then actions of the best are moved while that helps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import Action, F, I, Schedule, W
from meshwright.schedule.builders import BUILDERS, Edges
from meshwright.schedule.list_scheduling import SLACK, arrange, greedy
from meshwright.schedule.lowering import lower
from meshwright.schedule.messages import parts_of
from meshwright.schedule.simulate import Costs, at_stage, simulate

Order = list[list[Action]]
"""For each rank its F and I."""

PATIENCE = (0.0, 0.5, 1.0)
"""Shares of a weight half that a rank rather idles than delays its next F or I; tried in turn."""


def find_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs,
    *,
    chunks: int = 1,
    limits: Sequence[float] | None = None,
    edges: Edges = None,
    tries: int = 100,
) -> Schedule:
    """Find a schedule of ``chunks`` stages per rank at least as fast as every built one.

    ``costs`` are those of ``ranks * chunks`` stages. ``limits`` are the memory of each rank for
    activations and gathered parameters, in the unit of ``costs``; the built schedules that need
    more do not count. Those with fewer stages per rank count with several neighbors as one stage.
    The time is the simulated one of a step. ``tries`` bounds the local search. The same arguments
    give the same schedule.

    Stages are assigned to ranks as the built schedules assign them: see `Schedule.stage_ranks`.
    Raises ``ValueError`` for costs or limits of another number of stages or ranks, and for sizes
    that are negative or above 1e100; `ScheduleError` where not even one microbatch at a time fits.
    """
    _check(ranks, chunks, costs, limits)

    def time_of(schedule: Schedule) -> float:
        found = simulate(lower(schedule), costs, events=False)
        if any(p > n + SLACK * n for p, n in zip(found.peaks, limits or (), strict=False)):
            return math.inf
        return found.makespan

    built = list(dict.fromkeys(built_schedules(ranks, microbatches, chunks, edges)))
    maps = {schedule.stage_ranks: schedule for schedule in built}
    # What is left for activations when all stages of a rank are gathered.
    gathered = chunks * max(at_stage(costs.parameters, s) for s in range(ranks * chunks))
    room = None if limits is None else [limit - gathered for limit in limits]
    begins = [(schedule, [[row] for row in _order_of(schedule)]) for schedule in built]
    begins += [
        (like, greedy(like, is_deep=deep)) for like in maps.values() for deep in (True, False)
    ]
    found = sorted(
        (
            _Candidate(done[1], patience, done[0])
            for like, queues in begins
            for patience in PATIENCE
            if (done := arrange(queues, like, costs, room, patience))
        ),
        key=lambda candidate: candidate.time,
    )[:4]
    if found:
        bound = _bound(maps, costs, microbatches)
        found.insert(0, _improved(found[0], costs, room, bound, tries))
    single = [] if limits is None else [_one_by_one(like) for like in maps.values()]
    automatic = (replace(each.schedule, name="automatic") for each in found)
    best = min([*built, *automatic, *single], key=time_of)
    if limits is not None and time_of(best) == math.inf:
        peaks = simulate(lower(single[0]), costs, events=False).peaks
        rank = max(range(ranks), key=lambda r: peaks[r] - limits[r])
        raise ScheduleError(
            f"rank {rank}: one microbatch at a time needs {peaks[rank]:g} of memory, and the limit "
            f"is {limits[rank]:g}: raise the limit, or take smaller microbatches"
        )
    return best


def _check(ranks: int, chunks: int, costs: Costs, limits: Sequence[float] | None) -> None:
    named: dict[str, float | Sequence[float]] = {
        name: getattr(costs, name)
        for name in ("forward", "input", "weight", "transfer", "activation", "parameters")
    }
    named["deferred"] = costs.held_between()
    named["limits"] = math.inf if limits is None else limits
    for name, value in named.items():
        values = (value,) if isinstance(value, int | float) else value
        what, expected = ("ranks", ranks) if name == "limits" else ("stages", ranks * chunks)
        if values is value and len(values) != expected:
            raise ValueError(f"{name}: expected {expected} {what}, found {len(values)}")
        for number, size in enumerate(values):
            if not 0 <= size <= 1e100 and not (name == "limits" and size == math.inf):
                raise ValueError(f"{name}[{number}]: expected a size of 0 to 1e100, found {size}")


# ------------------------------------------------------------------ what there is to begin with


def built_schedules(
    ranks: int, microbatches: int, chunks: int, edges: Edges = None
) -> Iterator[Schedule]:
    """Build every schedule that can be, also those of one stage per rank, on the stages of all."""
    for builder in BUILDERS.values():
        for count in sorted({1, chunks}, reverse=True):
            try:
                found = builder(ranks, microbatches, count, edges if count == chunks else None)
            except ValueError:
                continue
            yield found if count == chunks else _divided(found, chunks, edges)


def _divided(schedule: Schedule, chunks: int, edges: Edges) -> Schedule:
    """Divide each stage into ``chunks`` neighbors on its rank, which run one after another."""
    rows = []
    for rank in range(schedule.ranks):
        row: list[Action] = []
        for stage, operation, k, _ in schedule.actions(rank):
            parts = range(stage * chunks, (stage + 1) * chunks)
            row += [
                Action(part, operation, k)
                for part in (parts if operation is F else reversed(parts))
            ]
        rows.append(row)
    holders = [rank for rank in schedule.stage_ranks for _ in range(chunks)]
    return Schedule.of(schedule.name, rows, holders, schedule.microbatches, edges)


def _one_by_one(like: Schedule) -> Schedule:
    """Run one microbatch at a time on the stages of ``like``, in the least memory."""
    rows = []
    for rank in range(like.ranks):
        mine = like.stages_of(rank)
        row: list[Action] = []
        for k in range(like.microbatches):
            row += [Action(stage, F, k) for stage in mine]
            row += [Action(s, o, k) for s in reversed(mine) for o in (I, W)]
        rows.append(tuple(row))
    return replace(like, name="one-by-one", rows=tuple(rows))


def _order_of(schedule: Schedule) -> Order:
    """List the F and I of each rank, with an I for each B."""
    return [
        [
            part if part.operation is F else part._replace(operation=I)
            for action in schedule.actions(rank)
            for part in parts_of(action)
            if part.operation is not W
        ]
        for rank in range(schedule.ranks)
    ]


# -------------------------------------------------------------------------------- the search


def _bound(maps: Iterable[tuple[int, ...]], costs: Costs, microbatches: int) -> float:
    """A time that no schedule beats: what the busiest rank computes, on the best of ``maps``."""
    found = math.inf
    for holders in maps:
        busy = [0.0] * (max(holders) + 1)
        for stage, rank in enumerate(holders):
            parts = (costs.forward, costs.input, costs.weight)
            busy[rank] += sum(at_stage(part, stage) for part in parts)
        found = min(found, max(busy) * microbatches)
    return found


class _Candidate(NamedTuple):
    """An order of F and I, completed."""

    time: float
    patience: float
    schedule: Schedule


def _improved(
    best: _Candidate, costs: Costs, room: Sequence[float] | None, bound: float, tries: int
) -> _Candidate:
    """Move single actions of ``best``, as long as it becomes no slower."""
    dice, order = random.Random(0), _order_of(best.schedule)
    for _ in range(tries):
        if best.time <= bound * (1 + SLACK):
            break
        rank = dice.randrange(len(order))
        moved = _moved(order[rank], dice)
        if moved is None:
            continue
        queues = [[row if n != rank else moved] for n, row in enumerate(order)]
        done = arrange(queues, best.schedule, costs, room, best.patience)
        if done is not None and done[1] <= best.time:
            best = _Candidate(done[1], best.patience, done[0])
            order[rank] = moved
    return best


def _moved(row: list[Action], dice: random.Random) -> list[Action] | None:
    """Move an action of ``row`` a few places earlier; None if it has to stay where it is."""
    at = dice.randrange(len(row))
    action, to = row[at], at
    for _ in range(dice.randint(1, 4)):
        if to == 0 or not _may_swap(row[to - 1], action):
            break
        to -= 1
    if to == at:
        return None
    return [*row[:to], action, *row[to:at], *row[at + 1 :]]


def _may_swap(first: Action, second: Action) -> bool:
    """Whether ``second`` may come before ``first``: the order of a stage's F and I stays."""
    if first.stage != second.stage:
        return True
    return first.operation is not second.operation and first.microbatch != second.microbatch
