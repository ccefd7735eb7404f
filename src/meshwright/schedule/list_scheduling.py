"""List scheduling: an order of actions for each rank, by simulating ranks that act greedily.

A rank that is free takes the first ready action of its queues, in the order of the queues. Where
none is ready, it takes the oldest weight half that waits, and idles only where there is none.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from meshwright.schedule.actions import Action, F, I, Schedule, W
from meshwright.schedule.simulate import Costs, at_stage

Queues = Sequence[Sequence[Sequence[Action]]]
"""For each rank its queues of F and I, the first queue preferred; each queue keeps its order."""

SLACK = 1e-9
"""Relative difference of sums of memory that is rounding."""


def greedy(like: Schedule, *, is_deep: bool) -> Queues:
    """Queue what is ready by stage: I first, then F of later stages (``is_deep``) or of earlier."""
    queues = []
    for rank in range(like.ranks):
        mine = like.stages_of(rank)
        order = [(s, I) for s in mine]
        order += [(s, F) for s in (reversed(mine) if is_deep else mine)]
        queues.append([[Action(s, o, k) for k in range(like.microbatches)] for s, o in order])
    return queues


def arrange(
    queues: Queues,
    like: Schedule,
    costs: Costs | None = None,
    room: Sequence[float] | None = None,
    patience: float = 0.0,
) -> tuple[Schedule, float] | None:
    """Order the actions of ``queues`` and a weight half for each input half in them, and time it.

    ``like`` has the stages, their ranks and edges; its rows are not read. ``room`` is the memory of
    each rank for activations: a forward waits until it fits. A weight half runs where the next
    action of the queues is known to start later by ``patience`` times the weight half, or more.
    Returns None for queues that never end, in their order or for want of memory.
    """
    return _Arranging(like, costs or Costs(), room, patience).run(queues)


class _Arranging:
    """The state of all ranks. Ends of actions are infinite until the actions have started."""

    def __init__(
        self, like: Schedule, costs: Costs, room: Sequence[float] | None, patience: float
    ) -> None:
        stages, ranks = range(like.stages), like.stage_ranks

        def each(value: float | Sequence[float]) -> list[float]:
            return [at_stage(value, stage) for stage in stages]

        self._seconds = {F: each(costs.forward), I: each(costs.input), W: each(costs.weight)}
        self._activation = each(costs.activation)
        self._deferred = each(costs.held_between())
        delay = each(costs.transfer)

        def linked(here: int, there: int, sender: int) -> tuple[int, int, float]:
            return there, ranks[there], 0.0 if ranks[here] == ranks[there] else delay[sender]

        # What F reads and what reads it; for I the reverse. Each with the rank and the delay.
        before = [[linked(s, other, other) for other in like.sources[s]] for s in stages]
        after = [[linked(s, other, s) for other in like.targets[s]] for s in stages]
        self._reads = {F: before, I: [[linked(s, o, o) for o in like.targets[s]] for s in stages]}
        self._read_by = {F: after, I: [[linked(s, o, s) for o in like.sources[s]] for s in stages]}
        self._over = {o: [[math.inf] * like.microbatches for _ in stages] for o in (F, I)}
        count = max(ranks) + 1
        limits = [math.inf] * count if room is None else room
        self._room = [limit + SLACK * abs(limit) for limit in limits]
        self._patience = patience
        self._held = [0.0] * count
        self._late: list[deque[Action]] = [deque() for _ in range(count)]
        self._events = [(0.0, rank) for rank in range(count)]
        self._like = like
        self._rows: list[list[Action]] = [[] for _ in range(count)]
        self._ends = [0.0] * count
        """The end of each rank's last action."""

    def run(self, queues: Queues) -> tuple[Schedule, float] | None:
        left = [[deque(queue) for queue in listed] for listed in queues]
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._ends[rank]:  # else it has been busy since
                self._decide(rank, now, left[rank])
        if any(map(any, left)) or any(self._late):
            return None
        return replace(self._like, rows=tuple(map(tuple, self._rows))), max(self._ends)

    def _decide(self, rank: int, now: float, queues: list[deque[Action]]) -> None:
        soonest = math.inf
        for queue in queues:
            if not queue:
                continue
            action = queue[0]
            more = self._held[rank] + self._activation[action.stage]
            if action.operation is F and more > self._room[rank]:
                continue
            ready = self._ready(action)
            if ready <= now:
                queue.popleft()
                self._take(rank, action, now)
                return
            soonest = min(soonest, ready)
        late = self._late[rank]
        if late and soonest - now >= self._patience * self._seconds[W][late[0].stage]:
            self._take(rank, late.popleft(), now)
        elif soonest < math.inf:
            heapq.heappush(self._events, (soonest, rank))

    def _ready(self, action: Action) -> float:
        """When all that ``action`` reads has arrived; infinite while that is unknown."""
        stage, operation, k, _ = action
        ends = self._over[operation]
        ready = 0.0 if operation is F else self._over[F][stage][k or 0]
        for other, _, delay in self._reads[operation][stage]:
            arrives = ends[other][k or 0] + delay
            if arrives > ready:
                ready = arrives
        return ready

    def _take(self, rank: int, action: Action, now: float) -> None:
        stage, operation, k, _ = action
        self._rows[rank].append(action)
        self._ends[rank] = end = now + self._seconds[operation][stage]
        heapq.heappush(self._events, (end, rank))
        if operation is W:
            self._held[rank] -= self._deferred[stage]
            return
        if operation is F:
            self._held[rank] += self._activation[stage]
        else:
            self._held[rank] -= self._activation[stage] - self._deferred[stage]
            self._late[rank].append(action._replace(operation=W))
        self._over[operation][stage][k or 0] = end
        for _, reader, delay in self._read_by[operation][stage]:
            heapq.heappush(self._events, (max(end + delay, self._ends[reader]), reader))
