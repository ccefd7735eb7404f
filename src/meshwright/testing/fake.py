"""All ranks in one process: a thread for each, real numbers, no process group.

For tests that need several ranks but no processes: the order of collectives, the arithmetic of a
layout, a schedule. The threads share the process's random numbers, observers and named phases.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from meshwright.comm import Clock, Communicator, Pending, Transfer
from meshwright.comm.c10d.shares import Pair, amount_of
from meshwright.errors import LayoutError
from meshwright.launching.outcome import Ending, Outcome, RanksFailed
from meshwright.testing.meeting import FakeWork, RankCall, World
from meshwright.timeline import Collective

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
        self._check(output, tensor)
        self._check_share(output, tensor, "all_gather")
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
