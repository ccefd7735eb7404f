"""Uneven inputs: ranks that have run out of batches take part until all have.

Before each collective of a replica that uses one is coming, the ranks that still train say which::

    rank 0   forward  backward: REDUCE   forward  backward: REDUCE   end: DONE  reduce  end: DONE
    rank 1   forward  backward: REDUCE   end: DONE  reduce (zeros)       DONE          ...

A rank that is done answers with DONE, reads what the others do, and does its part of it.
"""

from __future__ import annotations

from enum import IntEnum
from types import TracebackType

from meshwright.data_parallel.replica import Replica
from meshwright.errors import CollectiveMismatchError

__all__ = ["Notice", "UnevenInputs"]


class Notice(IntEnum):
    """What a rank is about to do."""

    DONE = 0
    REDUCE = 1
    BROADCAST_BUFFERS = 2
    STOP = 3
    """It has no more inputs, and all ranks are to stop."""


class UnevenInputs:
    """A block in which ranks may run different numbers of iterations.

    Gradients are divided by the number of all ranks (``divide_by_initial_world_size``), so that
    late batches count as they would have, or by the number of those that still train. When the
    last rank is done, all get its parameters and buffers. With ``throw_on_early_termination`` the
    end of the first rank is an error on all of them instead. A rank that is done takes part with
    zeros, so gradients that were reduced before must have been zeroed; ``no_sync`` accumulates.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self._replica = replica
        self._communicator = replica.communicator
        self._divides_by_all = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._active: list[int] = []
        """Ranks that were training at the last notice; all ranks know the same."""
        self._was_uneven = False

    def __enter__(self) -> None:
        self._replica.reducer.on_reduction = self._before_reduction
        self._replica.on_buffers = self._before_buffers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._replica.reducer.on_reduction = None
        self._replica.on_buffers = None
        if kind is not None:
            return
        while (notice := self._give(Notice.STOP if self._throws else Notice.DONE)) is not None:
            if self._throws:
                raise RuntimeError(
                    f"Rank {self._world_rank()} exhausted all inputs. Ranks {self._names()} still "
                    "had some, and throw_on_early_termination=True stops all of them"
                )
            if notice is Notice.REDUCE:
                self._replica.reducer.shadow()
            else:
                self._replica.synchronise_buffers(self._active[0])
        if self._was_uneven:
            self._replica.synchronise_all(self._active[0])

    def _before_reduction(self) -> float | None:
        try:
            self._give(Notice.REDUCE)
        except RuntimeError:
            self._replica.reducer.withdraw()
            raise
        return None if self._divides_by_all else 1.0 / len(self._active)

    def _before_buffers(self) -> int:
        self._give(Notice.BROADCAST_BUFFERS)
        return self._active[0]

    def _give(self, own: Notice) -> Notice | None:
        """Exchange notices; what the ranks that train are about to do, None when none does.

        Raises RuntimeError when a rank wants all to stop, CollectiveMismatchError when those that
        train are about to do different things.
        """
        rows = self._communicator.gather_numbers([float(own)], label="uneven inputs")
        notices = [Notice(int(row[0])) for row in rows]
        active = [r for r, n in enumerate(notices) if n not in (Notice.DONE, Notice.STOP)]
        if not active:
            return None
        self._active = active
        self._was_uneven = self._was_uneven or len(active) < len(notices)
        if Notice.STOP in notices and own is not Notice.STOP:
            ended = [r for r, n in zip(self._communicator.ranks, notices, strict=True) if n == 3]
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks: "
                f"{ended} had no more, and throw_on_early_termination=True was asked for"
            )
        kinds = {notices[rank] for rank in active}
        if len(kinds) > 1:
            sides = ", ".join(
                f"rank {self._communicator.ranks[rank]}: {notices[rank].name}" for rank in active
            )
            raise CollectiveMismatchError(
                f"axis {self._communicator.axis}: inside join the ranks that train expect the same "
                f"collective next, found {sides}. Let every rank run the same kind of iterations"
            )
        return kinds.pop()

    def _world_rank(self) -> int:
        return self._communicator.ranks[self._communicator.rank]

    def _names(self) -> list[int]:
        return [self._communicator.ranks[rank] for rank in self._active]
