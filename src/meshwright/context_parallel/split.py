"""Which positions of each sequence a rank of axis context holds.

::

    documents   aaaaaaaaaaaaaaaabbbcc      one row of 21 tokens, 2 ranks
    rank 0      aaaa        aaaa   cc.     the long one by zigzag: pieces 0 and 3 of 4,
    rank 1          aaaaaaaa    bbb        and 1 and 2; short ones whole

Under a causal mask a token's work is the number of tokens before it in its document. Zigzag gives
each rank an early and a late piece, so that all have the same work; a short document stays whole,
on the rank with the least work so far, so that nothing of it is sent.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from meshwright.comm.streams import moved
from meshwright.gradients import IGNORED

SplitMethod = Literal["contiguous", "zigzag", "documents"]
Piece = tuple[int, int]
"""Positions from the first number up to the second."""


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Which positions of one row each rank holds."""

    ends: tuple[int, ...]
    """Where each document ends; the last is the length of the row."""
    parts: tuple[tuple[Piece, ...], ...]
    """The pieces of each rank, in order."""

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(
        lengths: tuple[int, ...],
        ranks: int,
        method: SplitMethod = "documents",
        max_share: float = 0.05,
    ) -> RowSplit:
        """Split a row of documents of ``lengths`` over ``ranks``: equally many tokens, up to one.

        "contiguous": rank r has the r-th chunk. "zigzag": of 2 * ranks pieces, rank r has the r-th
        and the r-th from the end. "documents": zigzag for documents with more work than
        ``max_share`` of a rank's mean, all others whole where they fit.

        Raises ValueError for a row with fewer tokens than ranks.
        """
        total = sum(lengths)
        if total < ranks:
            raise ValueError(
                f"axis context: a row has {total} tokens for {ranks} ranks. Pad it or set axis "
                f"context = {max(total, 1)}"
            )
        ends = [*itertools.accumulate(lengths)]
        dealer = _Dealer([total // ranks + (r < total % ranks) for r in range(ranks)])
        if method == "contiguous":
            dealer.deal_chunks(0, total)
        elif method == "zigzag":
            dealer.deal_zigzag(0, total)
        else:
            mean = sum(map(_work, lengths)) / ranks
            spans = sorted(zip(lengths, ends, strict=True), key=lambda span: (-span[0], span[1]))
            for length, end in spans:
                if _work(length) > max_share * mean:
                    dealer.deal_zigzag(end - length, length)
                else:
                    dealer.deal_whole(end - length, length)
        return RowSplit(tuple(ends), tuple(map(_joined, dealer.pieces)))


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Which positions of the rows of one batch each rank holds."""

    rows: tuple[RowSplit, ...]
    """One for each row of the batch, or a single one for any number of rows."""

    @staticmethod
    def of(
        documents: Sequence[Sequence[int]],
        ranks: int,
        method: SplitMethod = "documents",
        max_share: float = 0.05,
    ) -> ContextSplit:
        """Split rows, each of which has documents of the lengths given. See `RowSplit.of`."""
        return ContextSplit(
            tuple(RowSplit.of(tuple(row), ranks, method, max_share) for row in documents)
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows[0].parts)

    @property
    def length(self) -> int:
        """The number of positions of a row."""
        return self.rows[0].ends[-1]

    def positions(self, rank: int) -> torch.Tensor:
        """Return the positions of ``rank``, (rows, its tokens), int64 on the host, ascending."""
        return torch.stack(
            [
                torch.cat([torch.arange(*piece, device="cpu") for piece in row.parts[rank]])
                for row in self.rows
            ]
        )

    def positions_on(self, rank: int, device: torch.device) -> torch.Tensor:
        """Return `positions` on ``device``; they are copied once, and no host waits."""
        return _positions_on(self, rank, device)

    def documents(self) -> torch.Tensor:
        """Return the number of the document of each position, (rows, length), int64 on the host."""
        every = torch.arange(self.length, device="cpu")
        return torch.stack(
            [
                torch.bucketize(every, torch.tensor(row.ends, device="cpu"), right=True)
                for row in self.rows
            ]
        )

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each position's document begins and ends, (rows, length) each."""
        ends = [torch.tensor((0, *row.ends), device="cpu") for row in self.rows]
        numbers = [*zip(ends, self.documents(), strict=True)]
        begins = torch.stack([end[number] for end, number in numbers])
        return begins, torch.stack([end[number + 1] for end, number in numbers])

    def places(self) -> torch.Tensor:
        """Return each position's place in its document, (rows, length), int64 on the host."""
        return torch.arange(self.length, device="cpu") - self.bounds()[0]

    def part(self, whole: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the positions of ``rank`` along ``dim`` of ``whole``, whose dim 0 is the rows."""
        return _taken(whole, self.positions_on(rank, whole.device), dim)

    def whole(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Put the parts of all ranks together, in the order of positions."""
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)], 1).argsort(1)
        return _taken(torch.cat([*parts], dim), moved(order, parts[0].device), dim)


@functools.lru_cache(maxsize=64)
def _positions_on(split: ContextSplit, rank: int, device: torch.device) -> torch.Tensor:
    return moved(split.positions(rank), device)


def _taken(x: torch.Tensor, at: torch.Tensor, dim: int) -> torch.Tensor:
    if len(at) == 1:
        return x.index_select(dim, at[0])
    rows = torch.arange(len(at), device=x.device).unsqueeze(1)
    return x.movedim(dim, 1)[rows, at].movedim(1, dim)


def labels_of_parts(labels: torch.Tensor, split: ContextSplit, dim: int = 1) -> list[int]:
    """Count the ``labels`` of each rank's part that a mean loss counts, those other than -100."""
    counted = (labels != IGNORED).long()
    return [int(split.part(counted, rank, dim).sum()) for rank in range(split.ranks)]


def document_lengths(positions: torch.Tensor) -> list[list[int]]:
    """Return the lengths of the documents of each row of ``positions`` (rows, length).

    A document begins where positions begin, at 0, and where they fall.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = (positions[:, 1:] == 0) | (positions[:, 1:] < positions[:, :-1])
    found = []
    for row in begins.cpu():
        starts = [*row.nonzero().flatten().tolist(), len(row)]
        found.append([end - start for start, end in itertools.pairwise(starts)])
    return found


def _work(length: int) -> int:
    return length * (length + 1) // 2


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Sort ``pieces``, and make one of those that touch."""
    found: list[Piece] = []
    for start, stop in sorted(pieces):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


class _Dealer:
    """Deals pieces to ranks, each of which has room for a number of tokens."""

    def __init__(self, room: list[int]) -> None:
        self.room = room
        self.work = [0] * len(room)
        self.pieces: list[list[Piece]] = [[] for _ in room]

    def _give(self, rank: int, start: int, length: int, before: int) -> None:
        """Give ``rank`` ``length`` tokens, which have ``before`` others before in the document."""
        if length:
            self.pieces[rank].append((start, start + length))
            self.room[rank] -= length
            self.work[rank] += _work(before + length) - _work(before)

    def deal_chunks(self, start: int, length: int, order: Sequence[int] | None = None) -> None:
        """Fill the ranks in ``order`` with one chunk of the document each."""
        before = 0
        for rank in range(len(self.room)) if order is None else order:
            count = min(self.room[rank], length - before)
            self._give(rank, start + before, count, before)
            before += count

    def deal_zigzag(self, start: int, length: int) -> None:
        """Cut 2 * ranks pieces, apart by one token at most: the longer ones go where most room is.

        Room apart by one token at most stays so: every rank gets as many, and then, one by one, the
        rank with most room.
        """
        ranks = len(self.room)
        each, more = divmod(length, 2 * ranks)
        longer = [0] * ranks
        for _ in range(more):
            free = [rank for rank in range(ranks) if longer[rank] < 2]
            rank = max(free, key=lambda r: (self.room[r] - longer[r], -r))
            longer[rank] += 1
        before = 0
        for piece in range(2 * ranks):
            rank = min(piece, 2 * ranks - 1 - piece)
            # The later piece of a rank first: it has more work, so one longer token weighs less.
            count = each + (longer[rank] > (piece < ranks))
            self._give(rank, start + before, count, before)
            before += count

    def deal_whole(self, start: int, length: int) -> None:
        """Give all of it to the rank with the least work that has room, or fill several."""
        free = [rank for rank, room in enumerate(self.room) if room >= length]
        if free:
            self._give(min(free, key=lambda r: (self.work[r], r)), start, length, 0)
        else:
            self.deal_chunks(start, length, sorted(range(len(self.room)), key=self._most_room))

    def _most_room(self, rank: int) -> tuple[int, int]:
        return -self.room[rank], rank


def work_of(split: RowSplit) -> list[int]:
    """Count the pairs of a query and a key, under a causal mask, of each rank."""
    found = []
    for pieces in split.parts:
        total = 0
        for start, stop in pieces:
            while start < stop:
                i = bisect_right(split.ends, start)
                begin, end = (split.ends[i - 1] if i else 0), min(split.ends[i], stop)
                total += _work(end - begin) - _work(start - begin)
                start = end
        found.append(total)
    return found
