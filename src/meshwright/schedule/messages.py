"""Messages between ranks, of SEND and RECV actions.

An output is sent once to each rank that reads it, even for several stages; a gradient is sent from
each reader to the stage that made the value, which sums them in the order of stages.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from meshwright.schedule.actions import (
    BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    F,
    Operation,
    Schedule,
    W,
)


class Message(NamedTuple):
    """One payload between two ranks."""

    operation: Operation
    """SEND_F for outputs, SEND_B for gradients."""
    stage: int
    """The stage whose outputs these are, or whose backward made the gradients."""
    target: int
    """The rank that reads the outputs, or the stage whose outputs the gradients belong to."""
    microbatch: int
    source_rank: int
    target_rank: int


def parts_of(action: Action) -> tuple[Action, ...]:
    """Return the parts of an overlap, or the action itself."""
    return action.parts or (action,)


def produced(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the SENDs that follow the compute action ``action``."""
    found = []
    for stage, operation, microbatch, _ in parts_of(action):
        if operation is F and schedule.remote_targets[stage]:
            found.append(Action(stage, SEND_F, microbatch))
        elif operation in BACKWARD and operation is not W and schedule.remote_sources[stage]:
            found.append(Action(stage, SEND_B, microbatch))
    return tuple(found)


def wanted(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the RECVs that the compute action ``action`` waits for."""
    found = []
    for stage, operation, microbatch, _ in parts_of(action):
        if operation is F and schedule.remote_sources[stage]:
            found.append(Action(stage, RECV_F, microbatch))
        elif operation in BACKWARD and operation is not W and schedule.remote_targets[stage]:
            found.append(Action(stage, RECV_B, microbatch))
    return tuple(found)


def sent(action: Action, schedule: Schedule) -> tuple[Message, ...]:
    """Return the messages of a SEND, in the order of sending."""
    stage, operation, microbatch, _ = action
    here, k = schedule.stage_ranks[stage], microbatch or 0
    if operation is SEND_F:
        ranks = sorted({schedule.stage_ranks[s] for s in schedule.remote_targets[stage]})
        return tuple(Message(SEND_F, stage, rank, k, here, rank) for rank in ranks)
    return tuple(
        Message(SEND_B, stage, source, k, here, schedule.stage_ranks[source])
        for source in schedule.remote_sources[stage]
    )


def lanes(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """Map (sending rank, receiving rank) to the messages between them, in order."""
    found: dict[tuple[int, int], list[Message]] = {}
    for sender in range(schedule.ranks):
        for action in schedule.actions(sender):
            if action.operation is SEND_F or action.operation is SEND_B:
                for message in sent(action, schedule):
                    found.setdefault((sender, message.target_rank), []).append(message)
    return {pair: tuple(messages) for pair, messages in found.items()}


def received(schedule: Schedule, rank: int) -> dict[Action, tuple[Message, ...]]:
    """Map each RECV in the row of ``rank`` to the messages whose receives are posted with it.

    These are the messages that its stage reads, preceded by all that the same sender sends earlier:
    between two ranks receives are posted in the order of the sends.
    """
    coming = {
        source: deque(messages)
        for (source, target), messages in lanes(schedule).items()
        if target == rank
    }
    seen: set[Message] = set()
    found: dict[Action, tuple[Message, ...]] = {}
    for action in schedule.actions(rank):
        if action.operation is RECV_F or action.operation is RECV_B:
            posted: list[Message] = []
            for message in read(action, schedule):
                lane = coming.get(message.source_rank, deque())
                while message not in seen and lane:
                    seen.add(lane[0])
                    posted.append(lane.popleft())
            found[action] = tuple(posted)
    return found


def read(action: Action, schedule: Schedule) -> tuple[Message, ...]:
    """Return all messages that the stage of a RECV reads, in the order of their stages."""
    stage, operation, microbatch, _ = action
    here, k, ranks = schedule.stage_ranks[stage], microbatch or 0, schedule.stage_ranks
    if operation is RECV_F:
        return tuple(
            Message(SEND_F, source, here, k, ranks[source], here)
            for source in schedule.remote_sources[stage]
        )
    return tuple(
        Message(SEND_B, target, stage, k, ranks[target], here)
        for target in schedule.remote_targets[stage]
    )
