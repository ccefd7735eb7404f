"""The samples that each rank reads: one order of all samples, whatever the number of ranks.

::

    global batch 7     | 93 12 55  8 | 41 70  2 66 |      the same for one rank and for eight
    data_size 2        |   rank 0    |   rank 1    |      contiguous shares
    data_size 4        | r 0  | r 1  | r 2  | r 3  |

Each epoch is a new permutation of all samples, computed index by index with a keyed Feistel
network: no list of the dataset's size exists, and a resumed run needs only its position. Packed
rows take their documents in the same order, with a cursor after the last token.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from meshwright.errors import PlanError

_ROUNDS = 6
_WORD = (1 << 64) - 1
_ORDER = ("seed", "size")
"""The keys of a state that identify the order its position counts in."""


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of ``range(size)`` that needs no memory.

    A Feistel network permutes the next power of two; an index outside of ``size`` is encrypted
    again until it is inside (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002), in fewer than two steps on average.

    Alternatives considered: a shuffled list, whose memory grows with the data set on every rank;
    an affine map modulo ``size``, whose neighbors stay evenly spaced.
    """

    size: int
    seed: int
    epoch: int
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = f"meshwright.sampling {self.seed} {self.epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        keys = tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))
        object.__setattr__(self, "_keys", keys)

    def __getitem__(self, index: int) -> int:
        """Return the sample at position ``index`` of the order."""
        if not 0 <= index < self.size:
            raise IndexError(f"expected a place from 0 to {self.size - 1}, found {index}")
        # Both halves have at least one bit, so that every round changes something.
        bits = max((self.size - 1).bit_length(), 2)
        index = self._encrypt(index, bits)
        while index >= self.size:
            index = self._encrypt(index, bits)
        return index

    def _encrypt(self, value: int, bits: int) -> int:
        """Pass once through the network; halves of unequal width swap roles every round."""
        low = bits // 2
        high = bits - low
        left, right = value >> low, value & ((1 << low) - 1)
        for key in self._keys:
            mixed = (right + key) * 0x9E3779B97F4A7C15 & _WORD
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _WORD
            left, right = right, left ^ ((mixed ^ mixed >> 32) & ((1 << high) - 1))
            low, high = high, low
        return left << low | right

    def __len__(self) -> int:
        return self.size


class Sampler:
    """This rank's share of each global batch, in an order that does not depend on the ranks.

    Iterating yields lists of sample indices forever; a batch may span the end of an epoch.
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        position: int = 0,
    ) -> None:
        """Begin at ``position``; ``batch_size`` counts the samples of all ranks together.

        Raises ``PlanError`` when the data set is smaller than a batch or the batch does not divide
        among ``data_size`` ranks.
        """
        self.dataset_size = whole_number("dataset_size", dataset_size)
        self.batch_size = whole_number("batch_size", batch_size)
        self.seed = whole_number("seed", seed)
        self.data_rank = whole_number("data_rank", data_rank)
        self.data_size = whole_number("data_size", data_size)
        _check(dataset_size, batch_size, data_rank, data_size)
        self._position = _checked_position(position)
        self._permutation = Permutation(dataset_size, seed, self.epoch)

    @property
    def position(self) -> int:
        """Number of samples that all ranks together have taken so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._position // self.dataset_size

    @property
    def share(self) -> int:
        """The number of samples of each batch that one rank takes."""
        return self.batch_size // self.data_size

    def next_indices(self) -> list[int]:
        """Return this rank's samples of the next global batch, and advance by one batch."""
        begin = self._position + self.data_rank * self.share
        indices = [self._sample(place) for place in range(begin, begin + self.share)]
        self._position += self.batch_size
        return indices

    def _sample(self, place: int) -> int:
        epoch, index = divmod(place, self.dataset_size)
        if self._permutation.epoch != epoch:
            self._permutation = Permutation(self.dataset_size, self.seed, epoch)
        return self._permutation[index]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.next_indices()

    def state_dict(self) -> dict[str, int]:
        """Return the position and what determines the order that it counts in.

        Equal on all ranks; valid for any number of ranks. ``size`` is that of the dataset.
        """
        return {"position": self._position, "seed": self.seed, "size": self.dataset_size}

    def load_state_dict(self, state: Mapping[str, int]) -> Self:
        """Resume from a state of ``state_dict``.

        Raises ``ValueError`` for a state of another order. Older states hold a position alone;
        their order is not checked.
        """
        _check_order(state, self.state_dict())
        return self.move_to(state["position"])

    def move_to(self, position: int) -> Self:
        """Continue after ``position`` samples of all ranks together."""
        self._position = _checked_position(position)
        return self


class TokenRange(NamedTuple):
    """The tokens ``begin`` to ``end`` of a document, in a row."""

    place: int
    """Position of the document in the order of all epochs."""
    document: int
    begin: int
    end: int
    length: int
    """Tokens of the whole document."""


class PackedSampler:
    """This rank's share of each global batch of rows, packed from documents one after the other.

    ::

        documents in the order of the epoch    7 7 7 7 7 | 2 2 | 9 9 9 9 9 9 | ...
        rows of four tokens                    7 7 7 7 | 7 2 2 9 | 9 9 9 9 | 9 ...
                                                                          ^ the state: place, offset

    Each token occurs once per epoch. A row may span documents, and the end of an epoch. Every rank
    reads the length of each document of the global batch, once, and of no other.

    Alternatives considered: an index of all rows, whose memory and set-up grow with the data; bin
    packing, which holds many documents at once, so that these would be part of the state.
    """

    def __init__(
        self,
        lengths: Callable[[int], int],
        documents: int,
        row_length: int,
        batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        """Begin with the first document; ``batch_size`` counts the rows of all ranks together.

        ``lengths`` returns the number of tokens of one of the ``documents``. Raises ``PlanError``
        when the batch does not divide among ``data_size`` ranks.
        """
        if documents < 1 or row_length < 1:
            raise ValueError(
                "expected at least 1 document and rows of at least 1 token, found "
                f"{documents} documents and a row_length of {row_length}"
            )
        self.documents = whole_number("documents", documents)
        self.row_length = whole_number("row_length", row_length)
        self.batch_size = whole_number("batch_size", batch_size)
        self.seed = whole_number("seed", seed)
        _check(batch_size, batch_size, data_rank, data_size)
        self._lengths = lengths
        share = batch_size // data_size
        self._own = slice(data_rank * share, (data_rank + 1) * share)
        self._position, self._offset = 0, 0
        self._permutation = Permutation(documents, seed, 0)
        self._current = (-1, 0, 0)

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._position // self.documents

    def next_rows(self) -> list[list[TokenRange]]:
        """Return the pieces of this rank's rows of the next global batch, and advance by one batch.

        Raises ``ValueError`` when no document has a token, or the cursor is past the end of one.
        """
        return [self._next_row() for _ in range(self.batch_size)][self._own]

    def _next_row(self) -> list[TokenRange]:
        pieces: list[TokenRange] = []
        missing, empty = self.row_length, 0
        while missing:
            place, document, length = self._document()
            begin = self._offset
            if begin and begin >= length:
                raise ValueError(
                    f"document {document} has {length} tokens, and {begin} of them were taken: "
                    "these are not the documents of the loaded state"
                )
            end = min(length, begin + missing)
            if end > begin:
                pieces.append(TokenRange(place, document, begin, end, length))
            empty = 0 if end > begin else empty + 1
            if empty > self.documents:
                raise ValueError(f"none of the {self.documents} documents has a token")
            missing -= end - begin
            self._position, self._offset = (place + 1, 0) if end == length else (place, end)
        return pieces

    def _document(self) -> tuple[int, int, int]:
        """Return the position of the cursor, the document there, and its length."""
        if self._current[0] != self._position:
            epoch, index = divmod(self._position, self.documents)
            if self._permutation.epoch != epoch:
                self._permutation = Permutation(self.documents, self.seed, epoch)
            document = self._permutation[index]
            self._current = self._position, document, int(self._lengths(document))
        return self._current

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: equal on all ranks, valid for any number of ranks and rows.

        ``position`` counts finished documents, ``offset`` the tokens taken from the next, and
        ``size`` all documents.
        """
        return {
            "position": self._position,
            "offset": self._offset,
            "seed": self.seed,
            "size": self.documents,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> Self:
        """Resume from a cursor of ``state_dict``; raises as `Sampler.load_state_dict`."""
        _check_order(state, self.state_dict())
        self._position = _checked_position(state["position"])
        self._offset = _checked_position(state["offset"])
        return self


def whole_number(name: str, value: int) -> int:
    """Convert an integer of any type to Python's ``int``, which states can store.

    Raises ``TypeError``, with ``name``, for anything else.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer as {name}, found {value!r}") from None


def _check(dataset_size: int, batch_size: int, data_rank: int, data_size: int) -> None:
    if batch_size < 1 or not 0 <= data_rank < data_size:
        raise ValueError(
            f"expected a batch of at least 1 and a data_rank below data_size, found batch_size "
            f"{batch_size}, data_rank {data_rank}, data_size {data_size}"
        )
    problems: list[str] = []
    if dataset_size < batch_size:
        problems.append(
            f"the data are fewer than a batch: {dataset_size} samples for a batch_size of "
            f"{batch_size}; give more data (of a text also a shorter context), or a smaller "
            "batch_size"
        )
    if batch_size % data_size:
        smaller = batch_size - batch_size % data_size
        nearby = [str(size) for size in (smaller, smaller + data_size) if size]
        problems.append(
            f"batch_size {batch_size} does not divide among {data_size} data ranks; use "
            f"{' or '.join(nearby)}"
        )
    if problems:
        raise PlanError(problems)


def _check_order(state: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Reject a state of another order than ``own``; older states do not name theirs."""
    if set(state) not in (set(own), own.keys() - {*_ORDER}):
        raise ValueError(f"expected the keys {sorted(own)}, found {sorted(state)}")
    if other := [name for name in _ORDER if state.get(name, own[name]) != own[name]]:
        there, here = (", ".join(f"{name} {each[name]}" for name in other) for each in (state, own))
        raise ValueError(
            f"the state is of {there}, and {here} is given: their orders have nothing in common; "
            "give what it was saved with, or begin anew without it"
        )


def _checked_position(position: int) -> int:
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise ValueError(f"expected a position of at least 0 samples, found {position!r}")
    return position
