"""A rank's row of a lowered schedule, with all lookups that do not change between steps done.

The interpreter runs a list of `ScheduledAction`: for each action its stage, the messages that it
waits for, posts or sends, and the stages of this rank that read its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.pipelining.p2p import P2POperation
from meshwright.pipelining.residency import Residencies
from meshwright.pipelining.stage import PipelineStage
from meshwright.schedule.actions import (
    BACKWARD,
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
    dependencies,
)
from meshwright.schedule.messages import Message, parts_of, read, received, sent

CustomFunction = Callable[[Action, Any], object]
"""Runs in place of an action; its second argument is a `PipelineContext`."""


@dataclass(slots=True, eq=False)
class ScheduledAction:
    """One action of the row, or one part of an overlap."""

    action: Action
    """The action in the row, for error messages."""
    part: Action
    """The action, or the part of it."""
    text: str
    """That of the part."""
    operation: Operation
    index: int
    microbatch: int
    stage: PipelineStage
    residencies: Residencies
    """Those of the stage; empty for a plain one."""
    reads: tuple[P2POperation, ...] = ()
    """Receives that a compute action waits for and no earlier one of this row has."""
    posts: tuple[P2POperation, ...] = ()
    sends: tuple[P2POperation, ...] = ()
    targets: tuple[PipelineStage, ...] = ()
    """The stages of this rank that read a forward's outputs."""
    sources: tuple[PipelineStage, ...] = ()
    """The stages of this rank that a backward gives gradients to."""
    custom: CustomFunction | None = None
    """The function of the user that runs instead."""
    parts: tuple[ScheduledAction, ...] = ()
    """For an overlap that a function of the user runs."""
    waits: bool = field(init=False)
    """True when it must wait for messages or parameters before it runs."""

    def __post_init__(self) -> None:
        computes = self.operation is F or self.operation in BACKWARD
        self.waits = computes and bool(self.reads or self.residencies)

    @property
    def where(self) -> str:
        """Its name in error messages; for a part of an overlap, with the overlap."""
        return self.text if self.part is self.action else f"{self.text} of {self.action}"


def program(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, PipelineStage],
    residencies: Mapping[int, Residencies],
    custom: Mapping[Operation, CustomFunction],
) -> list[ScheduledAction]:
    """Return the scheduled actions of the row of ``rank``; ``custom`` has the user's functions.

    Gathers and reductions of plain stages are left out unless a function replaces them. An overlap
    is one action if a function runs it and no part needs another; otherwise its parts are.
    """
    incoming = received(schedule, rank)
    operations: dict[Message, P2POperation] = {}
    last: dict[int, P2POperation] = {}  # by rank, its last message so far
    waited: set[Message] = set()

    def here(indices: Iterable[int]) -> tuple[PipelineStage, ...]:
        return tuple(stages[index] for index in indices if index in stages)

    def operation_of(message: Message) -> P2POperation:
        if message not in operations:
            kind, stage, target, k, source, reader = message
            is_back, arrives = kind is SEND_B, reader == rank
            readers = (target,) if is_back else schedule.targets[stage]
            mine = here(readers) if arrives else ()
            at = stage if not arrives else mine[0].stage_index if mine else readers[0]
            label = f"{at}{'RECV_' if arrives else 'SEND_'}{'B' if is_back else 'F'}{k}"
            peer = source if arrives else reader
            operations[message] = P2POperation(message, label, peer, mine)
        return operations[message]

    def first_reads(action: Action) -> tuple[P2POperation, ...]:
        new = [message for message in read(action, schedule) if message not in waited]
        waited.update(new)
        return tuple(map(operation_of, new))

    def scheduled(action: Action, part: Action) -> ScheduledAction:
        index, operation, microbatch, _ = part
        reads, posts, sends, targets, sources = (), (), (), (), ()
        if operation is F:
            reads = first_reads(part._replace(operation=RECV_F))
            targets = here(schedule.targets[index])
        elif operation is B or operation is I:
            reads = first_reads(part._replace(operation=RECV_B))
            sources = here(schedule.sources[index])
        elif operation is RECV_F or operation is RECV_B:
            posts = tuple(map(operation_of, incoming[action]))
            for each in posts:
                if each.peer in last:
                    last[each.peer].following = each
                last[each.peer] = each
        elif operation is SEND_F or operation is SEND_B:
            sends = tuple(map(operation_of, sent(part, schedule)))
        return ScheduledAction(
            action,
            part,
            str(part),
            operation,
            index,
            microbatch or 0,
            stages[index],
            residencies[index],
            reads,
            posts,
            sends,
            targets,
            sources,
            custom.get(operation),
        )

    found: list[ScheduledAction] = []
    for action in schedule.actions(rank):
        parts = [
            scheduled(action, part)
            for part in parts_of(action)
            if residencies[part.stage]
            or part.operation in custom
            or part.operation not in (UNSHARD, RESHARD, REDUCE_GRAD)
        ]
        needs = {need for part in action.parts for need in dependencies(part, schedule)}
        if action.operation in custom and action.parts and needs.isdisjoint(action.parts):
            first, operation = parts[0], action.operation
            overlap = ScheduledAction(
                action,
                action,
                str(action),
                operation,
                first.index,
                first.microbatch,
                first.stage,
                (),
            )
            overlap.custom, overlap.parts = custom[operation], tuple(parts)
            overlap.waits = any(part.waits for part in parts)
            parts = [overlap]
        found += parts
    return found
