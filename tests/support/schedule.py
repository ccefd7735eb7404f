"""Proof that a schedule ends on a transport that matches by order alone, like a device's.

There each communicator is a queue on either side. A transfer begins when it is at the head of its
queue and all compute that its rank issued before is done; the heads of both sides are matched as
one message, whatever they are. Compute actions run in the order of the row, after the receives that
they read. The result does not depend on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.schedule import Action, Schedule
from support.internals.schedule import (
    BACKWARD,
    COMPUTE,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    Costs,
    F,
    I,
    Message,
    W,
    arrange,
    parts_of,
    read,
    received,
    sent,
)

__all__ = ["OrderedTransfer", "check_ordered", "check_rows", "issued", "refilled"]

Lane = Callable[[Message], Hashable]
"""A function that returns the communicator of a message."""


def one_way(message: Message) -> Hashable:
    """Use one communicator for each pair of ranks and direction."""
    return message.source_rank, message.target_rank


class OrderedTransfer(NamedTuple):
    """One side of a message, as a rank issues it to its device."""

    message: Message
    is_send: bool


def issued(schedule: Schedule, rank: int, *, late: bool = False) -> list[Action | OrderedTransfer]:
    """List all that ``rank`` issues to its device, in order.

    With ``late``, receives are posted only once an action needs them, in the order of the sender:
    the case in which their metadata arrives last.
    """
    posts = received(schedule, rank)
    unposted: deque[Message] = deque()
    found: list[Action | OrderedTransfer] = []
    for action in schedule.actions(rank):
        if action.operation is RECV_F or action.operation is RECV_B:
            unposted.extend(posts[action])
            if not late:
                found += _posted(unposted, set(unposted))
        elif action.operation is SEND_F or action.operation is SEND_B:
            found += [OrderedTransfer(message, is_send=True) for message in sent(action, schedule)]
        elif action.operation in COMPUTE:
            found += _posted(unposted, set(needed(action, schedule)))
            found.append(action)
    return found


def _posted(unposted: deque[Message], wanted: set[Message]) -> list[OrderedTransfer]:
    """Remove ``wanted`` receives, and all before them in their lanes, from ``unposted``."""
    last = {m.source_rank: n for n, m in enumerate(unposted) if m in wanted}
    taken = [m for n, m in enumerate(unposted) if n <= last.get(m.source_rank, -1)]
    for message in taken:
        unposted.remove(message)
    return [OrderedTransfer(message, is_send=False) for message in taken]


def needed(action: Action, schedule: Schedule) -> list[Message]:
    """List the messages that a compute action reads."""
    found: list[Message] = []
    for part in parts_of(action):
        if part.operation is F:
            found += read(part._replace(operation=RECV_F), schedule)
        elif part.operation in BACKWARD and part.operation is not W:
            found += read(part._replace(operation=RECV_B), schedule)
    return found


def check_ordered(schedule: Schedule, *, lane: Lane = one_way) -> None:
    """Raise `ScheduleError` unless a lowered ``schedule`` ends with all messages matched correctly.

    Both the rows' own and the latest posting of receives are checked. ``lane`` gives each message's
    communicator.
    """
    for late in (False, True):
        rows = [issued(schedule, rank, late=late) for rank in range(schedule.ranks)]
        check_rows(schedule, rows, lane=lane)


def check_rows(
    schedule: Schedule, rows: list[list[Action | OrderedTransfer]], *, lane: Lane = one_way
) -> None:
    """Check ``rows``, what each rank issues to its device. Raises as `check_ordered` does."""
    devices = [_Device(schedule, row, lane) for row in rows]
    while any([device.compute() for device in devices] + [_move(devices)]):
        pass
    stuck = [
        f"rank {rank} waits with {device.actions[0]}, and its queues with {device.heads()}"
        for rank, device in enumerate(devices)
        if device.actions or any(device.queues.values())
    ]
    if stuck:
        raise ScheduleError(f"{schedule.name} never ends: " + "; ".join(stuck))


@dataclass(slots=True)
class _Device:
    """The device of one rank."""

    schedule: Schedule
    row: list[Action | OrderedTransfer]
    lane: Lane
    actions: deque[Action] = field(default_factory=deque)
    queues: dict[Hashable, deque[tuple[int, OrderedTransfer]]] = field(default_factory=dict)
    """By communicator, transfers with the number of compute actions issued before them."""
    done: int = 0
    here: set[Message] = field(default_factory=set)

    def __post_init__(self) -> None:
        for each in self.row:
            if isinstance(each, Action):
                self.actions.append(each)
            else:
                queue = self.queues.setdefault(self.lane(each.message), deque())
                queue.append((len(self.actions), each))

    def compute(self) -> bool:
        """Run all compute actions that can run; returns whether there were any."""
        before = self.done
        while self.actions and self.here.issuperset(needed(self.actions[0], self.schedule)):
            self.actions.popleft()
            self.done += 1
        return self.done > before

    def head(self, communicator: Hashable) -> OrderedTransfer | None:
        """The transfer at the head of a queue, if it may begin."""
        queue = self.queues.get(communicator)
        return queue[0][1] if queue and queue[0][0] <= self.done else None

    def heads(self) -> str:
        """Describe the first transfers of all queues."""
        first = [queue[0][1] for queue in self.queues.values() if queue]
        words = [f"{'send' if each.is_send else 'receive'} {_text(each.message)}" for each in first]
        return ", ".join(words) or "nothing"

    def end(self, communicator: Hashable, transfer: OrderedTransfer) -> None:
        """End the transfer at the head of a queue."""
        self.queues[communicator].popleft()
        if not transfer.is_send:
            self.here.add(transfer.message)


def _move(devices: list[_Device]) -> bool:
    """Run transfers of which both sides may begin; returns whether there were any."""
    has_moved = False
    for device in devices:
        for communicator in device.queues:
            mine = device.head(communicator)
            if mine is None or not mine.is_send:
                continue
            other = devices[mine.message.target_rank]
            theirs = other.head(communicator)
            if theirs is None or theirs.is_send:
                continue
            if theirs.message != mine.message:
                raise ScheduleError(
                    f"rank {mine.message.source_rank} sends {_text(mine.message)} where rank "
                    f"{mine.message.target_rank} takes it for {_text(theirs.message)}"
                )
            device.end(communicator, mine)
            other.end(communicator, theirs)
            has_moved = True
    return has_moved


def _text(message: Message) -> str:
    operation, stage, target, microbatch, _, _ = message
    kind = "outputs" if operation is SEND_F else f"gradients for stage {target}"
    return f"{kind} of stage {stage}, microbatch {microbatch}"


def refilled(
    schedule: Schedule, costs: Costs, limits: Sequence[float] | None = None
) -> Schedule | None:
    """Keep the order of F and I of each rank, and put its W where it would idle at ``costs``.

    From `zb2p` on, with limits of ``2 * ranks`` activations, this is ZB-2p for a model's costs.
    Returns None where the order does not fit.
    """
    orders = [
        [
            [
                part._replace(operation=I) if part.operation is B else part
                for action in schedule.actions(rank)
                for part in parts_of(action)
                if part.operation is not W
            ]
        ]
        for rank in range(schedule.ranks)
    ]
    done = arrange(orders, schedule, costs, limits)
    return None if done is None else done[0]
