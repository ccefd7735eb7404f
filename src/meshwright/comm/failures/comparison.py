"""Comparison of ranks: they do the same, asked the first time that this one does it."""

from __future__ import annotations

from meshwright.comm.collectives import Communicator
from meshwright.errors import CollectiveMismatchError

__all__ = ["Comparison"]


class Comparison:
    """The actions of this rank that were compared with the others."""

    def __init__(self) -> None:
        self._same: set[str] = set()

    def compare(self, communicator: Communicator, what: str) -> None:
        """``what`` is next. Collective, unless all ranks have done it together before.

        Raises `CollectiveMismatchError` on every rank where they do not do the same.
        """
        if what in self._same or communicator.size == 1:
            return
        rows = communicator.gather_bytes(what.encode(), label=f"compare {what}")
        if len(set(rows)) > 1:
            named = zip(communicator.ranks, rows, strict=True)
            texts = "; ".join(f"rank {rank} is in {row.decode()}" for rank, row in named)
            raise CollectiveMismatchError(
                f"the ranks of axis {communicator.axis} do not do the same: {texts}"
            )
        self._same.add(what)
