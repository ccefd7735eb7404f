"""Uneven inputs: ranks that have run out of batches take part until all ranks have.

Before each collective the ranks that still train announce it through an `Attendance`::

    rank 0   forward  backward: REDUCE   forward  backward: REDUCE   end: DONE  reduce  end: DONE
    rank 1   forward  backward: REDUCE   end: DONE  reduce (zeros)       DONE          ...

A rank that is done answers with DONE, reads what the others do, and takes part in it. Sharded
modules have their own notices, see `sharded_join`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import IntEnum

from meshwright.comm import Communicator
from meshwright.comm.failures.sameness import told
from meshwright.comm.observing import late
from meshwright.data_parallel.replicas.replica import Replica
from meshwright.errors import CollectiveMismatchError


class Notice(IntEnum):
    """What a rank announces that it does next."""

    DONE = 0
    REDUCE = 1
    BROADCAST_BUFFERS = 2
    STOP = 3
    """It has no more inputs, and all ranks are to stop."""
    UNSHARD = 4
    REDUCE_FURTHER = 5
    DELIVER = 6
    STEP = 7
    CLIP = 8


class Attendance:
    """Exchanges notices among all ranks of ``communicators`` (a grid), done ones included."""

    def __init__(self, communicators: Sequence[Communicator], *, throws: bool) -> None:
        self.communicators = tuple(communicators)
        self.active: list[int] = []
        """Positions of the ranks that trained at the last notice; all ranks know the same."""
        self.was_uneven = False
        """True when a rank was done while others were not."""
        self._throws = throws
        self._rank = communicators[0].ranks[communicators[0].rank]

    def give(self, own: Notice, detail: int = 0) -> tuple[Notice, int] | None:
        """Exchange notices; returns what the training ranks do next, None when all are done.

        Raises RuntimeError when a rank asks all to stop, CollectiveMismatchError when the training
        ranks are about to do different things.
        """
        late.settle()  # on devices: it may send, and ranks that are done settle only here
        rows = [(float(self._rank), float(own), float(detail))]
        for axis in self.communicators:
            flat = [number for row in rows for number in row]
            gathered = axis.gather_numbers(flat, label="uneven inputs")
            rows = [
                (row[at], row[at + 1], row[at + 2])
                for row in gathered
                for at in range(0, len(row), 3)
            ]
        said = [(int(rank), Notice(int(kind)), int(more)) for rank, kind, more in rows]
        train = {
            place: (rank, (notice, more))
            for place, (rank, notice, more) in enumerate(said)
            if notice not in (Notice.DONE, Notice.STOP)
        }
        if not train:
            return None
        self.active = list(train)
        self.was_uneven = self.was_uneven or len(train) < len(said)
        ended = [rank for rank, notice, _ in said if notice is Notice.STOP]
        if ended and own is not Notice.STOP:
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks: "
                f"{ended} had no more, and throw_on_early_termination=True was asked for"
            )
        ranks, kinds = zip(*train.values(), strict=True)
        if len(set(kinds)) > 1:
            found = told(ranks, [f"{notice.name} {more or ''}".rstrip() for notice, more in kinds])
            raise CollectiveMismatchError(
                f"axis {self.communicators[0].axis}: inside join the ranks that train expect the "
                f"same collective next, found {found}. Let every rank run the same kind of "
                "iterations"
            )
        if own is Notice.STOP:
            raise RuntimeError(
                f"Rank {self._rank} exhausted all inputs. Ranks {list(ranks)} still "
                "had some, and throw_on_early_termination=True stops all of them"
            )
        return kinds[0]

    def leave(self) -> tuple[Notice, int] | None:
        """Exchange notices as a rank that has no more inputs; see `give`."""
        return self.give(Notice.STOP if self._throws else Notice.DONE)


@contextlib.contextmanager
def uneven_inputs(
    replica: Replica, *, divides_by_all: bool, throws_on_early_termination: bool
) -> Iterator[None]:
    """A block in which ranks may run different numbers of iterations.

    Gradients are divided by the number of all ranks (``divides_by_all``), so that late batches keep
    their weight, or by the number of ranks that still train. When the last rank is done, all get
    its parameters and buffers. With ``throws_on_early_termination`` all ranks raise instead when
    the first is done. A rank that is done takes part with zeros, so gradients that were reduced
    before must have been zeroed; use ``no_sync`` to accumulate.
    """
    reducer = replica.reducer
    for name, parameter in reducer.named:
        experts = reducer.experts.get(id(parameter))
        if experts is not None:
            raise ValueError(
                f"join: the module of {name!r} exchanges samples over axis "
                f"{experts.exchange.axis!r} in its forward, which a rank without inputs does not "
                "run. Give every rank equally many batches"
            )
    attendance = Attendance([replica.communicator], throws=throws_on_early_termination)

    def before_reduction() -> float | None:
        try:
            attendance.give(Notice.REDUCE)
        except Exception:
            reducer.reset()
            raise
        return None if divides_by_all else 1.0 / len(attendance.active)

    def before_buffers() -> int:
        attendance.give(Notice.BROADCAST_BUFFERS)
        return attendance.active[0]

    with reducer.alignment.copies.parting():
        reducer.on_reduction = before_reduction
        replica.on_buffers = before_buffers
        try:
            yield
        finally:
            reducer.on_reduction = None
            replica.on_buffers = None
        while (found := attendance.leave()) is not None:
            if found[0] is Notice.REDUCE:
                reducer.shadow()
            else:
                replica.buffers.synchronize(attendance.active[0])
    if attendance.was_uneven:
        replica.synchronize_all(attendance.active[0])
    reducer.alignment.start_over()
