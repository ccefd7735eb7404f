"""A rank's row of a lowered schedule, with all lookups that do not change between steps done.

The interpreter runs a list of `Entry`: for each action its stage, the messages that it waits for,
posts or sends, and the stages of this rank that read its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.stepping.residency import Several
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
    F,
    Operation,
    Schedule,
    W,
    dependencies,
)
from meshwright.schedule.messages import Message, parts_of, read, received, sent

CustomFunction = Callable[[Action, Any], object]
"""Runs in place of an action; its second argument is a `PipelineContext`."""


@dataclass(slots=True, eq=False)
class Leg:
    """One message from or to this rank, with its label."""

    message: Message
    label: str
    peer: int
    """The other rank."""
    readers: tuple[PipelineStage, ...] = ()
    """For an incoming message, the stages of this rank that read it."""
    following: Leg | None = None
    """For an incoming message, the next one from the same rank."""

    def precede(self, following: Leg) -> None:
        self.following = following


@dataclass(slots=True, eq=False)
class Entry:
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
    residency: Several | None
    """None for a plain stage."""
    reads: tuple[Leg, ...] = ()
    """Legs that a compute action waits for and no earlier one of this row has."""
    posts: tuple[Leg, ...] = ()
    sends: tuple[Leg, ...] = ()
    targets: tuple[PipelineStage, ...] = ()
    """The stages of this rank that read a forward's outputs."""
    sources: tuple[PipelineStage, ...] = ()
    """The stages of this rank that a backward gives gradients to."""
    custom: CustomFunction | None = None
    """The function of the user that runs instead."""
    parts: tuple[Entry, ...] = ()
    """For an overlap that a function of the user runs."""
    waits: bool = field(init=False)
    """True when it must wait for messages or parameters before it runs."""

    def __post_init__(self) -> None:
        computes = self.operation is F or self.operation in BACKWARD
        needs = computes and (bool(self.reads) or self.residency is not None)
        self.waits = any(part.waits for part in self.parts) if self.parts else needs

    @property
    def where(self) -> str:
        """Its name in error messages; for a part of an overlap, with the overlap."""
        return self.text if self.part is self.action else f"{self.text} of {self.action}"


def program(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, PipelineStage],
    residencies: Mapping[int, Several],
    custom: Mapping[Operation, CustomFunction],
) -> list[Entry]:
    """Return the entries of the row of ``rank``; ``custom`` has the user's functions.

    Gathers and reductions of plain stages are left out unless a function replaces them. An overlap
    is one entry if a function runs it and no part needs another; otherwise its parts are entries.
    """
    return _Compiler(schedule, rank, stages, residencies, custom).run()


class _Compiler:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, PipelineStage],
        residencies: Mapping[int, Several],
        custom: Mapping[Operation, CustomFunction],
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._stages = stages
        self._residencies = residencies
        self._custom = custom
        self._received = received(schedule, rank)
        self._legs: dict[Message, Leg] = {}
        self._last: dict[int, Leg] = {}
        """By rank, the last incoming leg so far."""
        self._seen: set[Message] = set()

    def run(self) -> list[Entry]:
        found: list[Entry] = []
        for action in self._schedule.actions(self._rank):
            entries = [self._entry(action, part) for part in parts_of(action)]
            listed = [entry for entry in entries if entry is not None]
            found += [self._overlap(action, listed)] if self._is_overlap(action) else listed
        return found

    def _is_overlap(self, action: Action) -> bool:
        """Whether a function of the user runs the parts of ``action`` together."""
        if action.operation not in self._custom or not action.parts:
            return False
        needs = {need for part in action.parts for need in dependencies(part, self._schedule)}
        return needs.isdisjoint(action.parts)

    def _overlap(self, action: Action, parts: list[Entry]) -> Entry:
        first, operation = parts[0], action.operation
        custom = self._custom[operation]
        return Entry(
            action,
            action,
            str(action),
            operation,
            first.index,
            first.microbatch,
            first.stage,
            None,
            custom=custom,
            parts=tuple(parts),
        )

    def _entry(self, action: Action, part: Action) -> Entry | None:
        index, operation, microbatch, _ = part
        schedule, k = self._schedule, microbatch or 0
        residency = self._residencies[index] or None
        custom = self._custom.get(operation)
        if residency is None and custom is None and operation in (UNSHARD, RESHARD, REDUCE_GRAD):
            return None
        stage = self._stages[index]
        found: dict[str, Any] = {}
        if operation is F:
            found["reads"] = self._read(part._replace(operation=RECV_F))
            found["targets"] = self._here(schedule.targets[index])
        elif operation is RECV_F or operation is RECV_B:
            found["posts"] = tuple(self._leg(message) for message in self._received[action])
            for leg in found["posts"]:
                before = self._last.get(leg.peer)
                if before is not None:
                    before.precede(leg)
                self._last[leg.peer] = leg
        elif operation is SEND_F or operation is SEND_B:
            found["sends"] = tuple(self._leg(message) for message in sent(part, schedule))
        elif operation in BACKWARD and operation is not W:
            found["reads"] = self._read(part._replace(operation=RECV_B))
            found["sources"] = self._here(schedule.sources[index])
        told = action, part, str(part), operation, index, k, stage, residency
        return Entry(*told, custom=custom, **found)

    def _here(self, stages: tuple[int, ...]) -> tuple[PipelineStage, ...]:
        return tuple(self._stages[stage] for stage in stages if stage in self._stages)

    def _read(self, action: Action) -> tuple[Leg, ...]:
        new = [message for message in read(action, self._schedule) if message not in self._seen]
        self._seen.update(new)
        return tuple(self._leg(message) for message in new)

    def _leg(self, message: Message) -> Leg:
        found = self._legs.get(message)
        if found is None:
            operation, stage, target, k, source, reader = message
            is_back = operation is SEND_B
            arrives = reader == self._rank
            readers = (target,) if is_back else self._schedule.targets[stage]
            at = readers[0] if arrives else stage
            verb = ("RECV_" if arrives else "SEND_") + ("B" if is_back else "F")
            label, peer = f"{at}{verb}{k}", source if arrives else reader
            here = self._here(readers) if arrives else ()
            if arrives and here and not is_back:
                label = f"{here[0].stage_index}{verb}{k}"
            found = self._legs[message] = Leg(message, label, peer, here)
        return found
