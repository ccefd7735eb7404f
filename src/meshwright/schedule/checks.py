"""Checks of a schedule before it runs. Every error draws the schedule and marks the place.

``check`` checks compute actions: all present, each on its stage's rank, forwards before backwards.
``check_lowered`` simulates the exact rows that will run, with sends that complete only with their
receive and receives that never block, and finds deadlocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.errors import ScheduleError
from meshwright.schedule.actions import (
    COMPUTE,
    PER_MICROBATCH,
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
    Schedule,
    W,
    dependencies,
)
from meshwright.schedule.messages import Message, parts_of, received, sent
from meshwright.schedule.text import draw


def check(schedule: Schedule, *, ranks: int | None = None, forward_only: bool = False) -> None:
    """Raise `ScheduleError` unless each stage does all its work, on its rank, in a legal order.

    Each stage needs F of every microbatch once and, unless ``forward_only``, B or both I and W of
    every microbatch once. ``ranks`` is the expected number of ranks.
    """
    _check_shape(schedule, ranks)
    done: Counter[tuple[int, object]] = Counter()
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for position, action in enumerate(row):
            for part in () if action is None else parts_of(action):
                if problem := _problem(schedule, rank, part, seen):
                    where = draw(schedule, {rank: position})
                    raise ScheduleError(f"rank {rank}, {action}: {problem}\n{where}")
                seen.add(part)
                done[part.stage, part.operation] += 1
    for stage in range(schedule.stages):
        _check_counts(schedule, stage, done, forward_only=forward_only)


def _check_shape(schedule: Schedule, ranks: int | None) -> None:
    expected = max(schedule.stage_ranks, default=-1) + 1 if ranks is None else ranks
    if schedule.ranks != expected:
        raise ScheduleError(
            f"Schedule has incorrect number of ranks - expected {expected}, actual "
            f"{schedule.ranks}\n{draw(schedule)}"
        )
    for rank in range(schedule.ranks):
        if not any(True for _ in schedule.actions(rank)):
            raise ScheduleError(
                f"Schedule is missing actions for rank {rank}\n{draw(schedule, {rank: 0})}"
            )
    for source, target in schedule.edges:
        if not 0 <= source < target < schedule.stages:
            raise ScheduleError(
                f"stage {target} reads from stage {source}: values only go to later stages, and "
                f"there are {schedule.stages}\n{draw(schedule)}"
            )


def _problem(schedule: Schedule, rank: int, part: Action, seen: set[Action]) -> str:
    """Describe the fault of ``part`` after ``seen`` on its rank; empty if there is none."""
    stage, operation, k, _ = part
    if not 0 <= stage < schedule.stages:
        return f"there is no stage {stage}, only {schedule.stages}"
    if schedule.stage_ranks[stage] != rank:
        return f"stage {stage} is on rank {schedule.stage_ranks[stage]}"
    if operation not in PER_MICROBATCH:
        return ""
    if k is None or not 0 <= k < schedule.microbatches:
        return f"there is no microbatch {k}, only {schedule.microbatches}"
    if part in seen:
        return "it has been there before"
    if operation in COMPUTE:
        # Check only dependencies on this stage: those on other ranks depend on time.
        for need in dependencies(part, schedule):
            is_here = need.stage == stage and need.operation in COMPUTE
            if is_here and need not in seen:
                return f"{need} has to come before"
    if operation is B and Action(stage, I, k) in seen:
        return "its input half has run already"
    if operation is I and Action(stage, B, k) in seen:
        return "its whole backward has run already"
    return ""


def _check_counts(
    schedule: Schedule, stage: int, done: Counter[tuple[int, object]], *, forward_only: bool
) -> None:
    expected, where = schedule.microbatches, draw(schedule)
    if done[stage, F] != expected:
        raise ScheduleError(
            f"Got {done[stage, F]} F microbatches for stage {stage}, expected {expected}\n{where}"
        )
    counts = {operation: done[stage, operation] for operation in (B, I, W)}
    wanted = 0 if forward_only else expected
    if counts[B] + counts[I] != wanted or counts[I] != counts[W]:
        raise ScheduleError(
            f"Invalid backward microbatches for stage {stage}: expected {wanted} of B or of I with "
            f"W, got {counts[B]} B, {counts[I]} I, {counts[W]} W\n{where}"
        )


# ------------------------------------------------------------------------- deadlock


def check_lowered(schedule: Schedule) -> None:
    """Raise `ScheduleError` if the rows deadlock, or use values that are not there.

    The error names the cycle of actions that wait for each other.
    """
    _Rendezvous(schedule).run()


@dataclass(slots=True)
class _Rank:
    """The progress of one rank through its row."""

    row: tuple[Action | None, ...]
    reads: dict[Action, tuple[Message, ...]]
    position: int = 0
    unsent: deque[Message] | None = None
    """The unsent messages of the SEND at ``position``; None before it has begun."""
    posted: dict[int, deque[Message]] = field(default_factory=dict)
    """By source rank, the posted receives that have not been matched, in order."""
    here: set[Message] = field(default_factory=set)
    full: set[int] = field(default_factory=set)

    @property
    def action(self) -> Action | None:
        return self.row[self.position] if self.position < len(self.row) else None


class _Rendezvous:
    """Runs all rows, without modeling time."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._ranks = [
            _Rank(row, received(schedule, rank)) for rank, row in enumerate(schedule.rows)
        ]
        operations = {a.operation for row in schedule.rows for a in row if a is not None}
        self._gathers = UNSHARD in operations
        self._done: set[Action] = set()

    def run(self) -> None:
        while sum(self._advance(number) for number in range(len(self._ranks))):
            pass
        stuck = {n: r.position for n, r in enumerate(self._ranks) if r.position < len(r.row)}
        if stuck:
            raise ScheduleError(
                f"the schedule never ends: {self._cycle(stuck)}\n{draw(self._schedule, stuck)}"
            )

    def _advance(self, number: int) -> bool:
        rank, has_moved = self._ranks[number], False
        while rank.position < len(rank.row):
            action = rank.action
            if action is not None and not self._step(number, rank, action):
                return has_moved
            rank.position += 1
            rank.unsent = None
            has_moved = True
        return has_moved

    def _step(self, number: int, rank: _Rank, action: Action) -> bool:
        """Run ``action``; False if it has to wait."""
        operation = action.operation
        if operation in COMPUTE:
            for part in parts_of(action):
                if any(self._is_missing(number, need) for need in self._needs(part)):
                    return False
                self._done.add(part)
            return True
        if operation is RECV_F or operation is RECV_B:
            for message in rank.reads[action]:
                rank.posted.setdefault(message.source_rank, deque()).append(message)
            return True
        if operation is SEND_F or operation is SEND_B:
            return self._send(number, rank, action)
        if operation is UNSHARD:
            rank.full.add(action.stage)
        elif operation is RESHARD:
            rank.full.discard(action.stage)
        elif operation is REDUCE_GRAD:
            self._require(number, rank, [n for n in self._needs(action) if n not in self._done])
        return True

    def _send(self, number: int, rank: _Rank, action: Action) -> bool:
        unsent = rank.unsent
        if unsent is None:
            self._require(number, rank, [n for n in self._needs(action) if n not in self._done])
            unsent = rank.unsent = deque(sent(action, self._schedule))
        while unsent:
            message = unsent[0]
            target = self._ranks[message.target_rank]
            posted = target.posted.get(number)
            if not posted:
                return False
            posted.popleft()
            target.here.add(unsent.popleft())
        return True

    def _needs(self, action: Action) -> Iterable[Action]:
        return dependencies(action, self._schedule)

    def _is_missing(self, number: int, need: Action) -> bool:
        """Whether a compute action of rank ``number`` has to wait for ``need``.

        Raises if waiting cannot help: for parameters that were not gathered, a receive that is not
        in the row, or an action of this rank.
        """
        rank = self._ranks[number]
        if need.operation is UNSHARD:
            if self._gathers and need.stage not in rank.full:
                self._require(number, rank, [need])
            return False
        if need.operation is RECV_F or need.operation is RECV_B:
            if need not in rank.reads:
                self._require(number, rank, [need])
            return any(
                message in posted
                for message in rank.reads[need]
                for posted in (rank.posted.get(message.source_rank, ()),)
            )
        if self._schedule.stage_ranks[need.stage] != number:
            # Its result arrives by a receive.
            return need not in self._done
        if need not in self._done:
            self._require(number, rank, [need])
        return False

    def _require(self, number: int, rank: _Rank, missing: list[Action]) -> None:
        if missing:
            raise ScheduleError(
                f"rank {number}, {rank.action}: {', '.join(map(str, missing))} has to come before"
                f"\n{draw(self._schedule, {number: rank.position})}"
            )

    def _cycle(self, stuck: dict[int, int]) -> str:
        """Describe the cycle of waiting ranks, starting at one stuck rank."""
        number = min(stuck)
        seen: list[int] = []
        texts: list[str] = []
        while number not in seen and number in stuck:
            seen.append(number)
            rank = self._ranks[number]
            if rank.unsent:
                message = rank.unsent[0]
                other, what = message.target_rank, f"the receive of {_text(message)}"
            else:
                need = self._awaited(number, rank)
                other, what = self._schedule.stage_ranks[need.stage], str(need)
            texts.append(f"rank {number} at {rank.action} waits for {what} on rank {other}")
            number = other
        return "; ".join(texts)

    def _awaited(self, number: int, rank: _Rank) -> Action:
        action = rank.action
        if action is None:
            raise ScheduleError(f"rank {number} waits at the end of its row")
        for part in parts_of(action):
            for need in self._needs(part):
                if self._is_missing(number, need):
                    is_receive = need.operation in (RECV_F, RECV_B)
                    sends = dependencies(need, self._schedule) if is_receive else (need,)
                    return next((s for s in sends if s not in self._done), sends[0])
        raise ScheduleError(f"rank {number} does not know what it waits for at {action}")


def _text(message: Message) -> str:
    kind = "the outputs" if message.operation is SEND_F else "the gradients"
    of = "" if message.operation is SEND_F else f" for stage {message.target}"
    return f"{kind} of stage {message.stage}, microbatch {message.microbatch}{of}"
