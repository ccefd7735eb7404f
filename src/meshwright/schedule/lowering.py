"""Adds transfers, gathers, frees and reductions to compute actions.

``lower`` is a pure function, so all ranks get the same rows. A SEND comes right after the action
whose result it carries; a RECV is posted one compute action before the one that waits for it, or
earlier where sends that complete only with their receive would otherwise deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import (
    BACKWARD,
    COMPUTE,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Action,
    F,
    Schedule,
)
from meshwright.schedule.messages import Message, parts_of, produced, read, sent, wanted

MALFORMED = "Malformed compute schedule, can't schedule sends/recvs"


def lower(schedule: Schedule, *, unsharded: int = 3, reduce: bool = True) -> Schedule:
    """Add all other actions to ``schedule``, which has compute actions only.

    At most ``unsharded`` stages of a rank are gathered at a time (at least two if an overlap uses
    two). Raises ``ValueError`` if it has other actions already, `ScheduleError` if its order
    deadlocks with transfers.
    """
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if action.operation not in COMPUTE:
                raise ValueError(
                    "Expected compute-only schedule but found communication action "
                    f"{action} on rank {rank}"
                )
    compute = [list(schedule.actions(rank)) for rank in range(schedule.ranks)]
    posts = _Posts(schedule, compute).place()
    rows = []
    for rank, row in enumerate(compute):
        before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
        after: list[list[Action]] = [[] for _ in row]
        _add_residency(row, unsharded, before, after)
        for position, action in posts[rank]:
            before[position].append(action)
        for index, action in enumerate(row):
            after[index][:0] = produced(action, schedule)
        if reduce:
            _add_reductions(row, after)
        whole: list[Action] = []
        for index, action in enumerate(row):
            whole += [*before[index], action, *after[index]]
        rows.append([*whole, *before[len(row)]])
    return replace(schedule, rows=tuple(map(tuple, rows)))


def compute_part(schedule: Schedule) -> Schedule:
    """Return ``schedule`` without its transfers, gathers and reductions."""
    rows = (
        tuple(a for a in schedule.actions(rank) if a.operation in COMPUTE)
        for rank in range(schedule.ranks)
    )
    return replace(schedule, rows=tuple(rows))


def forward_part(schedule: Schedule) -> Schedule:
    """Return the forwards of a compute-only schedule, in their order, for an evaluation."""
    rows = tuple(
        tuple(part for a in schedule.actions(rank) for part in parts_of(a) if part.operation is F)
        for rank in range(schedule.ranks)
    )
    return replace(schedule, rows=rows)


def _add_reductions(row: list[Action], after: list[list[Action]]) -> None:
    last: dict[int, int] = {}
    for index, action in enumerate(row):
        for part in parts_of(action):
            if part.operation in BACKWARD:
                last[part.stage] = index
    for stage, index in sorted(last.items()):
        # Insert it before a RESHARD, which frees the parameters.
        place = next((n for n, a in enumerate(after[index]) if a.operation is RESHARD), None)
        at = len(after[index]) if place is None else place
        after[index].insert(at, Action(stage, REDUCE_GRAD))


def with_residency(
    compute_actions: Iterable[Action | None], max_active_stages: int = 3
) -> list[Action]:
    """Add gathers and frees of stages to one rank's compute actions; None is an idle slot.

    At most ``max_active_stages`` stages are gathered at a time, as in `lower`.
    """
    row = [action for action in compute_actions if action is not None]
    before: list[list[Action]] = [[] for _ in row]
    after: list[list[Action]] = [[] for _ in row]
    _add_residency(row, max_active_stages, before, after)
    parts = zip(before, row, after, strict=True)
    return [each for first, action, rest in parts for each in (*first, action, *rest)]


def _add_residency(
    row: list[Action], limit: int, before: list[list[Action]], after: list[list[Action]]
) -> None:
    """Gather each stage before its use; evict the one whose next use is farthest away.

    This needs the fewest gathers (Belady 1966). A gather is posted one compute action ahead if
    there is room for it by then.
    """
    uses: dict[int, deque[int]] = {}
    for index, action in enumerate(row):
        for part in parts_of(action):
            uses.setdefault(part.stage, deque()).append(index)
    there: set[int] = set()
    before_this: set[int] = set()
    """Stages that are gathered while the previous action runs."""
    for index, action in enumerate(row):
        stages = {part.stage for part in parts_of(action)}
        for stage in sorted(stages - there):
            if len(there) >= max(limit, len(stages)):
                farthest = max(sorted(there - stages), key=lambda s: uses[s][0])
                there.remove(farthest)
                before[index].append(Action(farthest, RESHARD))
            there.add(stage)
            early = index - 1 if index and len(before_this) < limit else index
            before_this.add(stage)
            before[early].append(Action(stage, UNSHARD))
        for part in parts_of(action):
            uses[part.stage].popleft()
        before_this = set(there)
        for stage in sorted(stages):
            if not uses[stage]:
                there.remove(stage)
                after[index].append(Action(stage, RESHARD))


@dataclass(slots=True)
class _RankProgress:
    """The progress of a rank: its next compute action, and what it must send first."""

    index: int = 0
    unsent: deque[Message] = field(default_factory=deque)


class _Posts:
    """Finds the compute action before which each RECV is posted."""

    def __init__(self, schedule: Schedule, compute: list[list[Action]]) -> None:
        self._schedule = schedule
        self._compute = compute
        self._position: list[dict[Action, int]] = [{} for _ in compute]
        self._carrier: dict[Message, Action] = {}
        """The RECV that receives a message: the first that needs it."""
        for rank, row in enumerate(compute):
            for index, action in enumerate(row):
                for recv in wanted(action, schedule):
                    self._position[rank][recv] = max(0, index - 1)
                    for message in read(recv, schedule):
                        self._carrier.setdefault(message, recv)

    def place(self) -> list[list[tuple[int, Action]]]:
        """Return each rank's RECVs with positions, in the order of posting."""
        self._unblock()
        return [
            sorted(((at, recv) for recv, at in where.items()), key=lambda item: item[0])
            for where in self._position
        ]

    def _sent_by(self, action: Action) -> Iterator[Message]:
        for send in produced(action, self._schedule):
            for message in sent(send, self._schedule):
                if message not in self._carrier:
                    raise ScheduleError(
                        f"{MALFORMED}: rank {message.target_rank} has no action that reads what "
                        f"{send} sends it"
                    )
                yield message

    def _unblock(self) -> None:
        """Simulate rows with sends that wait for their receive; post blocked receives earlier."""
        places = [_RankProgress() for _ in self._compute]
        arrived: set[Message] = set()
        while True:
            if sum(self._run(rank, places, arrived) for rank in range(len(places))):
                continue
            blocked = next((place.unsent[0] for place in places if place.unsent), None)
            if blocked is None:
                break
            place = places[blocked.target_rank]
            # A rank with unsent messages stands right behind the action that made them.
            now = place.index - 1 if place.unsent else place.index
            self._position[blocked.target_rank][self._carrier[blocked]] = max(0, now)
        for rank, place in enumerate(places):
            if place.index < len(self._compute[rank]):
                waiting = self._compute[rank][place.index]
                missing = [m for m in self._wanted_by(waiting) if m not in arrived]
                raise ScheduleError(
                    f"{MALFORMED}: rank {rank} comes no further than {waiting}, which waits for "
                    + ", ".join(f"stage {m.stage} on rank {m.source_rank}" for m in missing)
                )

    def _wanted_by(self, action: Action) -> Iterator[Message]:
        for recv in wanted(action, self._schedule):
            yield from read(recv, self._schedule)

    def _run(self, rank: int, places: list[_RankProgress], arrived: set[Message]) -> bool:
        """Advance one rank as far as possible; returns whether it has moved."""
        place, row, has_moved = places[rank], self._compute[rank], False
        while True:
            while place.unsent:
                message = place.unsent[0]
                target = places[message.target_rank]
                posted = self._position[message.target_rank][self._carrier[message]]
                reached = target.index - 1 if target.unsent else target.index
                if posted > reached:
                    return has_moved
                arrived.add(place.unsent.popleft())
                has_moved = True
            if place.index == len(row):
                return has_moved
            action = row[place.index]
            if any(message not in arrived for message in self._wanted_by(action)):
                return has_moved
            place.unsent.extend(self._sent_by(action))
            place.index += 1
            has_moved = True
