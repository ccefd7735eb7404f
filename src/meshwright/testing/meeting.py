"""Where the fake ranks of one process meet, and the arithmetic of their collectives.

Sums run in rank order, so results do not depend on which thread comes first. Sends wait for their
receives. When every rank that is left waits for something that cannot arrive, all raise at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from meshwright.comm.failures.sameness import told
from meshwright.comm.shared_memory.reductions import accumulate
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)
from meshwright.timeline import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """One rank's part in an operation."""

    rank: int
    """Rank within the group."""
    ranks: tuple[int, ...]
    """The group, as ranks of the world."""
    collective: Collective
    tensor: torch.Tensor
    """A copy of its input, taken when it was issued."""
    output: torch.Tensor
    tag: int = 0
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None

    @property
    def world_rank(self) -> int:
        """Rank in the world."""
        return self.ranks[self.rank]

    def form(self) -> tuple[object, ...]:
        """Return the part of a call that must be equal on all ranks."""
        c = self.collective
        size = None if c.kind in {"all_to_all", "barrier"} else self.tensor.numel()
        dtype = None if c.kind == "barrier" else c.dtype
        root = c.peer if c.kind == "broadcast" else None
        return c.kind, c.reduction, root, size, dtype

    def __str__(self) -> str:
        c = self.collective
        reduction = f", {c.reduction}" if c.reduction else ""
        return f"{c} ({tuple(self.tensor.shape)}, {c.dtype}{reduction})"


class FakeWork:
    """The handle that a fake rank waits on."""

    def __init__(self, world: World, call: RankCall) -> None:
        self.call = call
        self.error: CommunicationError | None = None
        self.is_done = False
        self._world = world

    def is_completed(self) -> bool:
        """True when the other ranks have arrived, or can no longer arrive."""
        return self.is_done

    def end(self, error: CommunicationError | None) -> None:
        """End the operation, with ``error`` if it failed."""
        self.error, self.is_done = error, True

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the other ranks; raises the operation's error, or RuntimeError on timeout."""
        seconds = None if timeout is None else timeout.total_seconds()
        if not self._world.await_end(self, seconds):
            raise RuntimeError("the operation has not ended yet")
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Meeting:
    """The calls of one collective that have arrived so far."""

    calls: dict[int, RankCall] = field(default_factory=dict)
    works: list[FakeWork] = field(default_factory=list)


class World:
    """The meetings of all fake ranks of one run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._meetings: dict[object, _Meeting] = defaultdict(_Meeting)
        self._transfers: dict[object, deque[FakeWork]] = defaultdict(deque)
        self._waiting: dict[int, FakeWork] = {}
        self._ended: dict[int, BaseException | None] = {}

    # ------------------------------------------------------------------------ what ranks do

    def join(self, place: object, call: RankCall) -> FakeWork:
        """Join the collective at ``place``; the last rank to arrive computes it for all."""
        work = FakeWork(self, call)
        with self._changed:
            meeting = self._meetings[place]
            meeting.calls[call.rank] = call
            meeting.works.append(work)
            if len(meeting.calls) == len(call.ranks):
                del self._meetings[place]
                self._finish(meeting.works, _perform, [c for _, c in sorted(meeting.calls.items())])
        return work

    def transfer(self, group: object, call: RankCall) -> FakeWork:
        """Send or receive one message; both calls end when they are matched."""
        work = FakeWork(self, call)
        peer = call.collective.peer or 0
        sends = call.collective.kind == "send"
        pair = (call.rank, peer) if sends else (peer, call.rank)
        key, other = (group, pair, call.tag, sends), (group, pair, call.tag, not sends)
        with self._changed:
            if not self._transfers[other]:
                self._transfers[key].append(work)
                return work
            match = self._transfers[other].popleft()
            calls = [call, match.call] if sends else [match.call, call]
            self._finish([work, match], _deliver, calls)
        return work

    def await_end(self, work: FakeWork, seconds: float | None) -> bool:
        """Wait until ``work`` is done; False when ``seconds`` have passed first."""
        rank = work.call.world_rank
        with self._changed:
            self._waiting[rank] = work
            self._look_whether_stuck()
            done = self._changed.wait_for(lambda: work.is_done, seconds)
            if self._waiting.get(rank) is work:
                del self._waiting[rank]
            return done

    def end(self, rank: int, error: BaseException | None) -> None:
        """Mark ``rank`` as ended: it has returned, or raised ``error``."""
        with self._changed:
            self._ended[rank] = error
            self._look_whether_stuck()

    # ----------------------------------------------------------------------------- the rest

    def _finish(
        self,
        works: Sequence[FakeWork],
        compute: Callable[[Sequence[RankCall]], None],
        calls: list[RankCall],
    ) -> None:
        error: CommunicationError | None = None
        try:
            with torch.no_grad():
                compute(calls)
        except CommunicationError as mismatch:
            error = mismatch
        for work in works:
            work.end(error)
        self._changed.notify_all()

    def _look_whether_stuck(self) -> None:
        """End the waits of all ranks with an error if none of them can continue."""
        open_works = {rank: work for rank, work in self._waiting.items() if not work.is_done}
        if not open_works or len(open_works) + len(self._ended) < self.size:
            return
        failed = next((rank for rank, error in self._ended.items() if error is not None), None)
        lines = [f"rank {rank} waits in {work.call}" for rank, work in sorted(open_works.items())]
        lines += [f"rank {rank} has ended" for rank in sorted(self._ended) if rank != failed]
        for work in open_works.values():
            work.end(
                CollectiveTimeoutError("no rank can go on:\n" + "\n".join(lines))
                if failed is None
                else RankFailedError(f"rank {failed} failed first: {self._ended[failed]!r}", failed)
            )
        self._changed.notify_all()


def _perform(calls: Sequence[RankCall]) -> None:
    """Compute one collective from the calls of all its ranks, in rank order."""
    _check_equal(calls)
    kind = calls[0].collective.kind
    match kind:
        case "all_reduce":
            total = _reduced(calls)
            for call in calls:
                call.output.copy_(total.view_as(call.output))
        case "reduce_scatter":
            shares = _reduced(calls).view(-1).chunk(len(calls))
            for call, share in zip(calls, shares, strict=True):
                call.output.view(-1).copy_(share)
        case "all_gather":
            whole = torch.cat([call.tensor.reshape(-1) for call in calls])
            for call in calls:
                call.output.view(-1).copy_(whole)
        case "broadcast":
            source = calls[calls[0].collective.peer or 0].tensor
            for call in calls:
                call.output.copy_(source.view_as(call.output))
        case "all_to_all":
            _exchange(calls)


def _check_equal(calls: Sequence[RankCall]) -> None:
    if len({call.form() for call in calls}) > 1:
        found = told((c.world_rank for c in calls), (f"issued {c}" for c in calls))
        raise CollectiveMismatchError(f"the ranks issued different operations: {found}")


def _reduced(calls: Sequence[RankCall]) -> torch.Tensor:
    total = torch.empty_like(calls[0].tensor)
    values = [call.tensor.view_as(total) for call in calls]
    accumulate(total, values, calls[0].collective.reduction or "sum")
    return total


def _exchange(calls: Sequence[RankCall]) -> None:
    size = len(calls)
    pieces = [_cut(call.tensor, call.input_splits, size) for call in calls]
    for receiver, call in enumerate(calls):
        rows = _cut(call.output, call.output_splits, size)
        for sender, row in enumerate(rows):
            piece = pieces[sender][receiver]
            if piece.shape != row.shape:
                raise CollectiveMismatchError(
                    f"{call.collective}: rank {calls[sender].world_rank} sends "
                    f"{tuple(piece.shape)} to rank {call.world_rank}, which expects "
                    f"{tuple(row.shape)}"
                )
            row.copy_(piece)


def _cut(
    tensor: torch.Tensor, splits: tuple[int, ...] | None, parts: int
) -> Sequence[torch.Tensor]:
    return tensor.split(list(splits)) if splits is not None else tensor.chunk(parts)


def _deliver(calls: Sequence[RankCall]) -> None:
    send, recv = calls
    if send.tensor.numel() != recv.output.numel() or send.tensor.dtype != recv.output.dtype:
        raise CollectiveMismatchError(
            f"rank {send.world_rank} issued {send}; rank {recv.world_rank} issued {recv}"
        )
    recv.output.copy_(send.tensor.view_as(recv.output))
