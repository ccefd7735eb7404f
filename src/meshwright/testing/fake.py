"""All ranks in one process: a thread for each, real numbers, no process group.

For tests that need several ranks but no processes: the order of collectives, the arithmetic of a
layout, a schedule. The threads share the process's random numbers, observers and named phases.

Sums run in rank order, so results do not depend on which thread comes first. Sends wait for their
receives. When every rank that is left waits for something that cannot arrive, all raise at once.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from meshwright.comm import Clock, Communicator, Pending, Transfer
from meshwright.comm.c10d.shares import Pair, amount_of
from meshwright.comm.failures.sameness import told
from meshwright.comm.shared_memory.reductions import accumulate
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    LayoutError,
    RankFailedError,
)
from meshwright.launching.outcome import Ending, Outcome, RanksFailed
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


P = ParamSpec("P")
T = TypeVar("T")


class FakeCommunicator(Communicator):
    """A `Communicator` among the threads of one process; `run_fake` makes them.

    ``collectives`` lists what this rank has issued. Operations that differ between ranks raise
    `CollectiveMismatchError` naming both sides, on all of them; ranks in a deadlock raise
    `CollectiveTimeoutError` at once.
    """

    def __init__(self, world: World, ranks: Sequence[int], rank: int, axis: str = "world") -> None:
        self._group, self._living = lambda: None, (None,)  # no process group
        self.axis = axis
        self.device, self.is_followed = torch.device("cpu"), False
        self.is_on_host = self.waits_on_host = True
        self.timeout = 60.0
        self.rank = rank
        self.size = len(ranks)
        self.is_alone = self.size == 1
        self.ranks = tuple(ranks)
        self.backend = "fake"
        self.name = f"fake {axis} {self.ranks}"
        self.clock = Clock(self.device)
        self._begin()
        self.collectives: list[Collective] = []
        self._world = world

    def split(self, groups: Sequence[Sequence[int]], axis: str) -> FakeCommunicator:
        """Make this rank's communicator for ``groups``, as `meshwright.comm.subgroup` does."""
        mine = [tuple(ranks) for ranks in groups if self.ranks[self.rank] in ranks]
        named = sorted(rank for ranks in groups for rank in ranks)
        if len(mine) != 1 or named != sorted(self.ranks):
            raise LayoutError(
                f"axis {axis}: expected groups that hold each of the ranks {list(self.ranks)} "
                f"once, found {[list(ranks) for ranks in groups]}"
            )
        if mine[0] == self.ranks:
            return self
        return FakeCommunicator(self._world, mine[0], mine[0].index(self.ranks[self.rank]), axis)

    def all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Gather every rank's ``tensor`` into ``output``, rank-major."""
        self._check(output, tensor, "all_gather")
        return self._meet("all_gather", [(tensor, output)], label)

    all_gather_list = all_gather
    """The same as `all_gather` here."""

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        label: str = "",
        async_op: bool = True,
    ) -> Pending:
        """Send part ``i`` of ``tensor`` to rank ``i``; ``output`` gets the parts, rank-major."""
        self._check(output, tensor)
        splits = (
            None if input_splits is None else tuple(input_splits),
            None if output_splits is None else tuple(output_splits),
        )
        return self._meet("all_to_all", [(tensor, output)], label, splits=splits)

    def _transfer(self, transfer: Transfer, batched: object = None) -> Pending:
        self._check(transfer.tensor)
        self._global(transfer.peer)
        return self._meet(
            transfer.direction,
            [(transfer.tensor, transfer.tensor)],
            transfer.label,
            peer=transfer.peer,
            tag=transfer.tag,
        )

    def _issue_together(
        self, kind: str, pairs: Sequence[Pair], label: str, start: Callable[..., Any]
    ) -> Pending:
        """Exchange the tensors of one coalesced launch with the other threads."""
        reduction = None if kind == "all_gather" else "sum"
        given = [(tensor, output) for output, tensor in pairs]
        return self._meet(kind, given, label, reduction=reduction)

    def _issue(
        self,
        kind: str,
        tensor: torch.Tensor,
        label: str,
        launch: Callable[[Any], Any],
        *,
        value: torch.Tensor | None = None,
        is_ours: bool = True,
        **about: Any,
    ) -> Pending:
        """Exchange with the other threads instead of c10d; a user's own call is left as it is."""
        if not is_ours:
            return super()._issue(kind, tensor, label, launch, value=value, is_ours=False, **about)
        return self._meet(kind, [(tensor, tensor if value is None else value)], label, **about)

    def _meet(
        self,
        kind: str,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        label: str,
        *,
        reduction: str | None = None,
        peer: int | None = None,
        tag: int = 0,
        splits: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None),
    ) -> Pending:
        """Issue an operation through the real communicator, with a launch that meets the threads.

        Each pair is this rank's input, and the tensor for the result.
        """
        given = [tensor for tensor, _ in pairs]

        def launch(group: object) -> tuple[list[FakeWork], None]:
            shape, dtype = amount_of(given[0], given[1:])
            collective = Collective(
                kind=kind,
                axis=self.axis,
                shape=shape,
                dtype=dtype,
                reduction=reduction,
                peer=peer,
                label=label,
                sequence=self.issued[-1].sequence,
            )
            self.collectives.append(collective)
            calls = [
                RankCall(
                    rank=self.rank,
                    ranks=self.ranks,
                    collective=collective,
                    tensor=tensor.detach().clone(),
                    output=output,
                    tag=tag,
                    input_splits=splits[0],
                    output_splits=splits[1],
                )
                for tensor, output in pairs
            ]
            if kind in {"send", "recv"}:
                return [self._world.transfer(self.name, call) for call in calls], None
            place = self.name, collective.sequence
            return [
                self._world.join((*place, number), call) for number, call in enumerate(calls)
            ], None

        first, *more = [output for _, output in pairs] if kind == "all_gather" else given
        value = pairs[0][1]  # observers see the tensor that a real communicator shows
        return super()._issue(
            kind, first, label, launch, reduction=reduction, peer=peer, value=value, more=more
        )


def run_fake(
    n: int,
    body: Callable[Concatenate[FakeCommunicator, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[T]:
    """Run ``body(communicator, *args, **kwargs)`` on ``n`` threads; return values in rank order.

    Raises `RanksFailed`, with the first exception as its cause, when any of them raised.

    >>> run_fake(2, lambda world: world.all_reduce(torch.ones(2)).wait().tolist())
    [[2.0, 2.0], [2.0, 2.0]]
    """
    if n < 1:
        raise ValueError(f"run_fake() needs at least 1 rank, got n={n}")
    world = World(n)
    start = time.monotonic()
    outcomes: dict[int, Outcome] = {}

    def rank_main(rank: int) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = body(FakeCommunicator(world, range(n), rank), *args, **kwargs)
        except BaseException as caught:
            error = caught
        now = time.monotonic()
        outcomes[rank] = Outcome(
            rank=rank,
            ending=Ending.RETURNED if error is None else Ending.RAISED,
            seconds=now - start,
            order=now,
            value=value,
            exception=error,
            traceback="" if error is None else "".join(traceback.format_exception(error)),
        )
        world.end(rank, error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"fake rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = [outcomes[rank] for rank in range(n)]
    if any(outcome.failed for outcome in ordered):
        failure = RanksFailed(ordered)
        raise failure from failure.first.exception
    return cast("list[T]", [outcome.value for outcome in ordered])
