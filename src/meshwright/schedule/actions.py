"""Action and Schedule: each rank's actions in order, and the one rule of their dependencies.

::

    2F0                    stage 2, forward of microbatch 0
    2I0  2W0  2B0          its backward: input half, weight half, both at once
    3SEND_F1  3RECV_B1     outputs of stage 3 to their readers; gradients of its outputs back
    1UNSHARD  1RESHARD     parameters of stage 1: gather, free
    1REDUCE_GRAD           gradients of stage 1: sum over the data-parallel ranks
    (0F8;3B0)OVERLAP_F_B   two actions of one rank that may overlap

A transfer is named after the stage that computes with it: ``3SEND_F1`` sends what stage 3 made,
``3RECV_F1`` receives what stage 3 reads, and ``3SEND_B1`` sends the gradients of what it has read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Operation(Enum):
    """The kind of an action. The value is its text; torch's long names are aliases."""

    F = "F"
    I = "I"  # noqa: E741
    W = "W"
    B = "B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    FORWARD = F
    BACKWARD_INPUT = I
    BACKWARD_WEIGHT = W
    FULL_BACKWARD = B

    # Members are singletons, so hash by identity: the default hash of an Enum runs Python code.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


F, I, W, B = Operation.F, Operation.I, Operation.W, Operation.B  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = (
    Operation.SEND_F,
    Operation.RECV_F,
    Operation.SEND_B,
    Operation.RECV_B,
)
UNSHARD, RESHARD, REDUCE_GRAD = Operation.UNSHARD, Operation.RESHARD, Operation.REDUCE_GRAD

BACKWARD = frozenset({I, W, B})
"""Operations that run autograd."""
COMPUTE = BACKWARD | {F, Operation.OVERLAP_F_B}
"""Operations of the compute lane, the only ones of a compute-only schedule."""
PER_MICROBATCH = BACKWARD | {F, SEND_F, RECV_F, SEND_B, RECV_B}
"""Operations that belong to one microbatch."""

_TEXT = re.compile(r"(0|[1-9][0-9]*)([A-Z][A-Z_]*)(0|[1-9][0-9]*)?")
_OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action of a rank. Build an overlap with ``overlap``, others directly or by ``parse``."""

    stage: int
    operation: Operation
    microbatch: int | None = None
    """None exactly for operations that belong to no microbatch."""
    parts: tuple[Action, ...] = ()
    """The two actions of an ``OVERLAP_F_B``, whose ``stage`` is that of the first."""

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse ``text`` as ``str`` writes an action. Raises ``RuntimeError`` for any other."""
        both = _OVERLAP.fullmatch(text)
        if both is not None:
            return overlap(*(cls._parse_single(part, text) for part in both.groups()))
        return cls._parse_single(text, text)

    @classmethod
    def _parse_single(cls, text: str, whole: str) -> Action:
        match = _TEXT.fullmatch(text)
        if match is None or not text.isascii():
            raise RuntimeError(
                f"Invalid action string: {whole!r}, should be formatted as [stage][action type]"
                "[(microbatch)] e.g. 2F0"
            )
        stage, name, microbatch = match.groups()
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise RuntimeError(
                f"Invalid computation type {name} in {whole!r}; known: {', '.join(_OPERATIONS)}"
            )
        if (microbatch is not None) != (operation in PER_MICROBATCH):
            wants = "needs" if operation in PER_MICROBATCH else "takes no"
            raise RuntimeError(
                f"Invalid action string: {whole!r}, should be formatted as [stage][action type]"
                f"[(microbatch)] e.g. 2F0: {name} {wants} microbatch"
            )
        return cls(int(stage), operation, None if microbatch is None else int(microbatch))

    @property
    def stage_index(self) -> int:
        """``stage``, under torch's name."""
        return self.stage

    @property
    def computation_type(self) -> Operation:
        """``operation``, under torch's name."""
        return self.operation

    @property
    def microbatch_index(self) -> int | None:
        """``microbatch``, under torch's name."""
        return self.microbatch

    @property
    def sub_actions(self) -> tuple[Action, ...] | None:
        """``parts``, under torch's name; None if there are none."""
        return self.parts or None

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.operation.value}"
        number = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.operation.value}{number}"


_OPERATIONS = {
    operation.value: operation for operation in Operation if operation.value != "OVERLAP_F_B"
}


def overlap(first: Action, second: Action) -> Action:
    """Combine ``first`` and ``second``, compute actions of one microbatch each, into one action.

    Raises ``RuntimeError`` for parts that are no F, I, W or B.
    """
    for part in (first, second):
        if part.operation not in COMPUTE or part.parts:
            raise RuntimeError(
                f"Invalid action string: ({first};{second})OVERLAP_F_B, expected two of "
                f"F, I, W, B; found {part}"
            )
    return Action(first.stage, Operation.OVERLAP_F_B, None, (first, second))


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    """Return the edges of a pipeline without skips: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every rank, and the rank of each stage. Immutable."""

    name: str
    rows: tuple[tuple[Action | None, ...], ...]
    """For each rank its actions in order; ``None`` is an idle time slot and has no effect."""
    stage_ranks: tuple[int, ...]
    """The rank of each stage."""
    microbatches: int
    edges: tuple[tuple[int, int], ...] = field(default=())
    """(source stage, target stage) of every value that crosses stages, sorted."""

    @classmethod
    def of(
        cls,
        name: str,
        rows: Iterable[Iterable[Action | None]],
        stage_ranks: Iterable[int],
        microbatches: int,
        edges: Iterable[tuple[int, int]] | None = None,
    ) -> Schedule:
        """Make a schedule from any iterables; without ``edges`` each stage feeds the next."""
        ranks = tuple(stage_ranks)
        joins = chain(len(ranks)) if edges is None else tuple(sorted(set(edges)))
        return cls(name, tuple(map(tuple, rows)), ranks, microbatches, joins)

    @property
    def ranks(self) -> int:
        """Number of ranks: one row each."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    def actions(self, rank: int) -> Iterator[Action]:
        """Iterate over the actions of ``rank`` in order, without idle slots."""
        return (action for action in self.rows[rank] if action is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages of ``rank``, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages whose outputs it reads, ascending."""
        return _neighbors(self.stages, ((target, source) for source, target in self.edges))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that read its outputs, ascending."""
        return _neighbors(self.stages, self.edges)

    @cached_property
    def remote_sources(self) -> tuple[tuple[int, ...], ...]:
        """As ``sources``, without those on the stage's own rank."""
        return tuple(self._elsewhere(stage, self.sources[stage]) for stage in range(self.stages))

    @cached_property
    def remote_targets(self) -> tuple[tuple[int, ...], ...]:
        """As ``targets``, without those on the stage's own rank."""
        return tuple(self._elsewhere(stage, self.targets[stage]) for stage in range(self.stages))

    @cached_property
    def split_backward(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) whose backward runs as I and W."""
        return frozenset(
            (part.stage, part.microbatch)
            for row in self.rows
            for action in row
            if action is not None
            for part in (action.parts or (action,))
            if part.operation is I and part.microbatch is not None
        )

    def _elsewhere(self, stage: int, others: tuple[int, ...]) -> tuple[int, ...]:
        rank = self.stage_ranks[stage]
        return tuple(other for other in others if self.stage_ranks[other] != rank)


def _neighbors(stages: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: list[set[int]] = [set() for _ in range(stages)]
    for here, there in pairs:
        found[here].add(there)
    return tuple(tuple(sorted(others)) for others in found)


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions, of any rank, that must have ended before ``action`` can run.

    The one rule that runtime, simulator and checks share. It names transfers and gathers even where
    the schedule has none, such as a compute-only one; callers skip these. For an action that occurs
    several times (UNSHARD), the last before ``action`` in its row is meant.
    """
    stage, operation, microbatch, parts = action
    if operation is F:
        needs = [Action(source, F, microbatch) for source in schedule.sources[stage]]
        if schedule.remote_sources[stage]:
            needs.append(Action(stage, RECV_F, microbatch))
        needs.append(Action(stage, UNSHARD))
        return tuple(needs)
    if operation is I or operation is B:
        needs = [Action(stage, F, microbatch)]
        needs += [_gradients(target, microbatch, schedule) for target in schedule.targets[stage]]
        if schedule.remote_targets[stage]:
            needs.append(Action(stage, RECV_B, microbatch))
        needs.append(Action(stage, UNSHARD))
        return tuple(needs)
    if operation is W:
        return (Action(stage, I, microbatch), Action(stage, UNSHARD))
    if operation is SEND_F:
        return (Action(stage, F, microbatch),)
    if operation is SEND_B:
        return (_gradients(stage, microbatch, schedule),)
    if operation is RECV_F:
        return tuple(Action(s, SEND_F, microbatch) for s in schedule.remote_sources[stage])
    if operation is RECV_B:
        return tuple(Action(s, SEND_B, microbatch) for s in schedule.remote_targets[stage])
    if operation is REDUCE_GRAD:
        return tuple(
            Action(stage, W if (stage, k) in schedule.split_backward else B, k)
            for k in range(schedule.microbatches)
        )
    inner = {need for part in parts for need in dependencies(part, schedule)}
    return tuple(sorted(inner.difference(parts), key=str))


def _gradients(stage: int, microbatch: int | None, schedule: Schedule) -> Action:
    """The action that computes the gradients of the inputs of ``stage``."""
    split = (stage, microbatch) in schedule.split_backward
    return Action(stage, I if split else B, microbatch)
