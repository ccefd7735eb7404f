"""Data loaders with a state of a few numbers, and samples that do not depend on ranks or workers.

::

    order of samples (`sampling`) ── indices ─> workers of torch's DataLoader ──> batches, in order
         │                                      each sample with its own random numbers
         └── the state after each batch is kept until that batch is returned
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import data as of_torch

from meshwright.comm import communicator
from meshwright.errors import CommunicationError
from meshwright.randomness import name_seed
from meshwright.sampling import PackedSampler, Sampler, TokenRange, whole_number

__all__ = ["DataLoader", "Dataset", "PackedDataLoader"]

T_co = TypeVar("T_co", covariant=True)
Batch = TypeVar("Batch")

IGNORED = -100
"""The label of tokens that are not predicted; losses of torch and Hugging Face skip it."""


class Dataset(Protocol[T_co]):
    """Samples by index: map-style datasets of torch and Hugging Face, lists."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class _Order(Protocol):
    """The order in which samples are drawn, and the position in it."""

    def draw(self) -> list[object]:
        """Return this rank's part of the next global batch, and advance."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> object: ...


class DataLoader(Generic[Batch]):
    """A loader of a map-style dataset: a position in one endless stream of samples.

    Each epoch is a new permutation of all samples; every sample comes once an epoch, on one rank.
    A batch may span the end of an epoch. A ``for`` loop ends with the batch in which the epoch
    ends, so each loop is one pass; the next loop continues from there, also after a ``break``. The
    stream does not depend on the number of ranks or workers or on the batch size, and `state_dict`
    holds the position in it: a few numbers, whatever the size of the data.

    The samples of a global batch are assigned to ranks in order. `torch`, `random` and
    `numpy.random` are seeded for each sample before it is read, so random augmentation does not
    depend on workers either; the generators of this process are restored.

    Workers read ahead, also past the end of a loop. They end when the loader is deleted, or moved
    by `load_state_dict`.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        batch_size: int,
        *,
        seed: int = 0,
        data_rank: int | None = None,
        data_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[object]], Batch] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        """Begin with the first sample of the first epoch.

        ``batch_size`` counts the samples of all ranks together. This rank reads share
        ``data_rank`` of ``data_size``; both are required where this process is one of several
        ranks. A `Trainable` has both; where every rank reads samples of its own, they are the rank
        and size of the world. The other parameters are those of torch's ``DataLoader``;
        ``collate_fn`` gets the samples of this rank.

        Raises ``PlanError`` when the dataset is smaller than a batch, or the batch does not divide
        among the shares, and ``ValueError`` on one of several ranks without a share.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "expected a map-style data set, with __len__ and __getitem__, found a "
                f"{type(dataset).__name__}: of a stream samples cannot be taken by number; torch's "
                "DataLoader reads it, and keeps no place in it"
            )
        self.dataset = dataset
        self.batch_size = whole_number("batch_size", batch_size)
        self.num_workers = num_workers
        self.data_rank, self.data_size = _share(data_rank, data_size)
        self._size = len(dataset)
        self._seed = whole_number("seed", seed)
        self._collate = collate_fn or of_torch.default_collate
        self._options: dict[str, object] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
        }
        self._place = self._order(self._seed).state_dict()
        self._ahead: deque[dict[str, int]] = deque()
        self._running: Iterator[Batch] | None = None

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._place["position"] // self._size

    def __len__(self) -> int:
        """Return the number of batches left in this pass."""
        left = self._size * (self.epoch + 1) - self._place["position"]
        return -(-left // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next_batch()

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, and the position in the epoch after the last batch returned.

        Equal on all ranks; valid for any number of ranks and workers and any batch size.
        ``size`` is that of the dataset.
        """
        epoch, position = divmod(self._place["position"], self._size)
        return {
            "seed": self._seed,
            "epoch": epoch,
            **self._place,
            "position": position,
            "size": self._size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a state of `state_dict`; its seed replaces this loader's.

        Raises ``ValueError`` for a state of another kind of loader, or of other data.
        """
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(f"expected the keys {sorted(expected)}, found {sorted(state)}")
        if state["size"] != self._size:
            raise ValueError(
                f"the state is of a data set of {state['size']} samples, this one has "
                f"{self._size}: their orders have nothing in common; give the data that the state "
                "was saved with, or begin anew without it"
            )
        place = {name: state[name] for name in self._place}
        place["position"] += state["epoch"] * self._size
        self._order(state["seed"]).load_state_dict(place)  # raises for invalid numbers
        self._seed, self._place, self._running = state["seed"], place, None

    def _next_batch(self) -> Batch:
        if self._running is None:
            self._running = self._start()
        try:
            batch = next(self._running)
        except BaseException:
            self._running = None  # read-ahead is lost: the next call restarts after the last batch
            raise
        self._place = self._ahead.popleft()
        return batch

    def _start(self) -> Iterator[Batch]:
        """Start reading at the current position, with new workers."""
        order = self._order(self._seed)
        order.load_state_dict(self._place)
        self._ahead = deque()
        loader = of_torch.DataLoader(
            cast("of_torch.Dataset[object]", self._reader()),
            batch_sampler=_drawn(order, self._ahead),
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # so that nothing is drawn from the caller's
            **self._options,  # pyrefly: ignore[bad-argument-type]
        )
        with torch.device("cpu"):  # where the generator is; forked workers inherit this default
            return iter(loader)

    def _order(self, seed: int) -> _Order:
        return _Samples(self._size, self.batch_size, seed, self.data_rank, self.data_size)

    def _reader(self) -> _Reader:
        return _Reader(self.dataset, self._seed, self._collate)


class PackedDataLoader(DataLoader[dict[str, Tensor]]):
    """A loader of rows of tokens, packed from consecutive documents.

    Each epoch takes the whole documents in a new order and splits their tokens into rows of
    ``row_length``: a document may continue in the next row, and a row may span documents and the
    end of an epoch. A batch is a mapping of int64 tensors ``(rows of this rank, row_length)``:

    * ``input_ids``, the tokens;
    * ``position_ids``, which restart at 0 with each document and each row;
    * ``labels``, the tokens, but -100 where ``position_ids`` is 0, as Hugging Face's models expect,
      which shift labels themselves.

    ``shifted`` gives ``shift_labels`` in place of these: at each position the token that follows,
    -100 where that begins a document or a row. They stay right when rows are split over ranks.

    The state is that of a `DataLoader` and ``offset``, the number of tokens taken from the next
    document. The stream of tokens does not depend on ``row_length`` either.
    """

    def __init__(
        self,
        documents: Dataset[object],
        row_length: int,
        batch_size: int,
        *,
        lengths: Dataset[int] | None = None,
        shifted: bool = False,
        seed: int = 0,
        data_rank: int | None = None,
        data_size: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        """Begin with the first document of the first epoch.

        A document is a sequence of token numbers (list, array, 1-D tensor), or a mapping that has
        one as ``input_ids``. ``lengths`` holds the number of tokens of each, as a list or a mapped
        array. Without it, the main process of each rank reads every document of the global batch,
        those of other ranks' rows too, to count its tokens: some microseconds each, plus the cost
        of reading. The rest is as in `DataLoader`; ``batch_size`` counts the rows of all ranks.
        """
        self._lengths = lengths
        self._is_shifted = shifted
        self.row_length = whole_number("row_length", row_length)
        super().__init__(
            documents,
            batch_size,
            seed=seed,
            data_rank=data_rank,
            data_size=data_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
        )

    def __len__(self) -> int:
        raise TypeError(
            "a PackedDataLoader cannot tell the number of its batches: it would have to know the "
            "length of every document"
        )

    def _order(self, seed: int) -> _Order:
        documents = self.dataset

        def read(document: int) -> int:
            with _generators_kept():
                return len(_tokens_of(documents[document]))

        find = read if self._lengths is None else self._lengths.__getitem__
        return _DocumentRows(
            find,
            self._size,
            self.row_length,
            self.batch_size,
            seed,
            self.data_rank,
            self.data_size,
        )

    def _reader(self) -> _Reader:
        return _RowReader(
            self.dataset, self._seed, of_torch.default_collate, shifted=self._is_shifted
        )


# ------------------------------------------------------------------------- in this process


class _Samples(Sampler):
    """An order of samples, each drawn as its position and its index."""

    def draw(self) -> list[object]:
        first = self.position + self.data_rank * self.share
        return list(enumerate(self.next_indices(), first))


class _DocumentRows(PackedSampler):
    """An order of documents, drawn as rows of pieces."""

    def draw(self) -> list[object]:
        return list(self.next_rows())


def _drawn(order: _Order, ahead: deque[dict[str, int]]) -> Iterator[list[object]]:
    """Draw batches forever, and append the state after each to ``ahead``."""
    while True:
        batch = order.draw()
        ahead.append(order.state_dict())
        yield batch


def _share(data_rank: int | None, data_size: int | None) -> tuple[int, int]:
    """Return this rank's share and the number of shares."""
    if data_rank is not None and data_size is not None:
        return data_rank, data_size
    try:
        ranks = communicator().size
    except CommunicationError:  # not connected
        ranks = 1
    if ranks > 1 or data_rank is not None or data_size is not None:
        raise ValueError(
            f"expected data_rank and data_size on each of {ranks} ranks, found {data_rank} and "
            f"{data_size}: give those of the Trainable, or rank and size of the world where every "
            "rank reads samples of its own; ranks that compute one model together read the same"
        )
    return 0, 1


# ----------------------------------------------------------------------------- in a worker


class _Reader:
    """The dataset as torch's loader sees it: reads and collates a batch, each sample seeded."""

    def __init__(
        self, dataset: Dataset[object], seed: int, collate: Callable[[list[object]], object]
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate

    def __getitems__(self, drawn: Sequence[object]) -> object:
        """Read and collate the samples that an order has drawn for one batch."""
        is_worker = of_torch.get_worker_info() is not None
        with contextlib.nullcontext() if is_worker else _generators_kept():
            return self._collate([self._sample(each) for each in drawn])

    def _sample(self, drawn: object) -> object:
        place, index = cast("tuple[int, int]", drawn)
        return self._read(place, index)

    def _read(self, place: int, index: int) -> object:
        key = name_seed(self._seed, "sample", place)
        torch.default_generator.manual_seed(key)
        random.seed(key)
        numpy.random.seed(key % 2**32)
        return self._dataset[index]


class _RowReader(_Reader):
    """A reader of rows."""

    def __init__(self, *given: Any, shifted: bool) -> None:
        super().__init__(*given)
        self._is_shifted = shifted

    def _sample(self, drawn: object) -> object:
        pieces = cast("list[TokenRange]", drawn)
        tokens = torch.cat([self._piece(piece) for piece in pieces])
        counts = (piece.end - piece.begin for piece in pieces)
        places = torch.cat([torch.arange(count, device=tokens.device) for count in counts])
        labels = tokens.where(places > 0, IGNORED)
        name = "labels"
        if self._is_shifted:
            name, labels = "shift_labels", functional.pad(labels[1:], (0, 1), value=IGNORED)
        return {"input_ids": tokens, "position_ids": places, name: labels}

    def _piece(self, piece: TokenRange) -> Tensor:
        document = _tokens_of(self._read(piece.place, piece.document))
        count = len(document)
        if count != piece.length:
            raise ValueError(
                f"document {piece.document}: expected {piece.length} tokens, by its length, found "
                f"{count}: give the number of tokens of each document as lengths, or none"
            )
        part = document[piece.begin : piece.end]
        if not isinstance(part, Tensor):  # of a list, or of an array of any type
            array = numpy.asarray(part)
            is_whole, kind = array.dtype.kind in "iu", array.dtype
            part = torch.from_numpy(array.astype(numpy.int64) if is_whole else numpy.empty(()))
        else:
            kind = part.dtype
            is_whole = not (part.is_floating_point() or part.is_complex() or kind == torch.bool)
        if not is_whole:
            raise TypeError(
                f"document {piece.document}: expected the numbers of tokens, found {kind}"
            )
        if part.shape != (piece.end - piece.begin,):
            raise ValueError(
                f"document {piece.document}: expected one row of tokens, found the shape "
                f"{(count, *part.shape[1:])}"
            )
        return part.long()


def _tokens_of(document: object) -> Sequence[int]:
    """Return the tokens of a document: itself, or its ``input_ids``."""
    found = document["input_ids"] if isinstance(document, Mapping) else document
    return cast("Sequence[int]", found)


def _as_it_is(batch: Batch) -> Batch:
    """Return ``batch``, which `_Reader` has collated."""
    return batch


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the generators of this process at the end."""
    before = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        numpy.random.set_state(before[2])
