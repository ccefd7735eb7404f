"""Operations that were issued, as reports name them and as waits of other ranks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.comm.failures.attendance import Answers, Need

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator

REMEMBERED = 16
"""The number of last operations that a rank can name in a hang report."""

_TRANSFERS = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Issued:
    """The record of an operation that a rank has issued."""

    sequence: int
    kind: str
    label: str
    peer: int | None = None

    def __str__(self) -> str:
        label = f' "{self.label}"' if self.label else ""
        return f"{self.kind} #{self.sequence}{label}"

    def describe(self, axis: str) -> str:
        """Describe it in one phrase: kind, number, label, ``axis``."""
        peer = ""
        if self.peer is not None:
            side = {"send": "to", "recv": "from"}.get(self.kind, "of")
            peer = f" {side} rank {self.peer}"
        return f"{self}{peer} on axis {axis}"


class AwaitedOperation:
    """An operation that has been issued, as a `Watch` sees it."""

    lacks = "has not issued it"

    def __init__(self, communicator: Communicator, issued: Issued, line: str = "") -> None:
        """``line`` is the user's that led to it, where that is not the one that waits."""
        self._communicator, self._issued, self._line = communicator, issued, line
        self._rank = communicator.ranks[communicator.rank]
        if issued.kind in _TRANSFERS and issued.peer is not None:
            self.ranks: Sequence[int] = [communicator.ranks[issued.peer]]
        else:
            self.ranks = [rank for rank in communicator.ranks if rank != self._rank]

    def topic(self, answers: Answers) -> str:
        """Name it alike on all ranks."""
        return f"{self._communicator.name}/{self._key(self._rank)}/{self._issued.sequence}"

    def describe(self) -> str:
        """Name it in one phrase."""
        called = f", called at {self._line}," if self._line else ""
        return f"{self._issued.describe(self._communicator.axis)}{called}"

    def need(self) -> Need:
        """Say whom it needs: the peer of a transfer, or the other ranks of the axis."""
        ranks, channel = Need.listed(self.ranks), self._communicator.name
        key = self._key(self.ranks[0]) if self.ranks else ""
        return Need(ranks=ranks, channel=channel, key=key, number=self._issued.sequence)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        """Check whether ``rank``, which says ``answer``, has issued it."""
        counts = self._group(answer).get("counts", {})
        return int(counts.get(self._key(rank), 0)) > self._issued.sequence

    def differences(self, answers: Answers) -> list[str]:
        """List what other ranks have issued at this number, where it is another operation."""
        issued = self._issued
        found: list[str] = []
        if issued.kind in _TRANSFERS:
            return []
        for rank in self.ranks:
            for entry in self._group(answers.get(rank, {})).get("last", ()):
                at_this_number = entry["sequence"] == issued.sequence
                if entry["kind"] in _TRANSFERS or not at_this_number:
                    continue
                if (entry["kind"], entry["label"]) != (issued.kind, issued.label):
                    label = f' "{entry["label"]}"' if entry["label"] else ""
                    found.append(f"rank {rank} issued {entry['kind']} #{issued.sequence}{label}")
        return found

    def last_of(self, answer: Mapping[str, Any]) -> str:
        """Say what a rank has issued last on the same axis."""
        last = self._group(answer).get("last", ())
        if not last:
            return ", nothing issued on this axis yet"
        label = f' "{last[-1]["label"]}"' if last[-1]["label"] else ""
        return f", last issued {last[-1]['kind']} #{last[-1]['sequence']}{label}"

    def _group(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = answer.get("groups", {}).get(self._communicator.name, {})
        return found

    def _key(self, rank: int) -> str:
        """Name the count under which ``rank`` numbers its side of the operation."""
        issued = self._issued
        if issued.kind not in _TRANSFERS:
            return ""
        if rank == self._rank:
            return f"{issued.kind}:{issued.peer}"
        other = "recv" if issued.kind == "send" else "send"
        return f"{other}:{self._communicator.rank}"
