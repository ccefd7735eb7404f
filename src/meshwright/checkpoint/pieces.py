"""Tensors of a checkpoint, plain or in boxes, and the choice of a writer among several holders.

Several ranks may hold the same box (replicas); it is written once, by the holder with the least to
write so far, which every rank computes alike. If the holders' values differ in the first MiB, such
as statistics of each rank's own batches, the first holder writes all of it, so that no tensor mixes
values of several ranks.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import Piece
from meshwright.checkpoint.tensor_file import DTYPES, OURS, algorithm, file_name, item_size
from meshwright.comm.dtensors.gather_dtensor import ShardedPiece
from meshwright.comm.streams import DeviceEvent, record
from meshwright.layout import Box

_HOST = torch.device("cpu")
_MARKED = 1 << 20
"""Bytes at the start of a box that holders compare; from a device each rank copies them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadTensor:
    """A full tensor that is read only when written: ranks that list it share the work."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def checked(self) -> Tensor:
        """Read it. Raises ``ValueError`` if shape or dtype differ from the description."""
        found = self.read()
        if (tuple(found.shape), found.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"expected a tensor of {self.dtype} {self.shape}, read {found.dtype} "
                f"{tuple(found.shape)}"
            )
        return found


class Held(NamedTuple):
    """One rank's part of one tensor, without the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    marks: tuple[int, ...] = ()
    """For each box a checksum of its first values, if other ranks may hold it too."""


NamedPiece = tuple[str, Piece]
"""The name of a tensor, and a piece whose checksum is not known yet."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype: ``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@lru_cache
def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype by name. Raises ``ValueError`` if this torch does not have it."""
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return dtype


def describe(name: str, value: Tensor | ShardedPiece | ReadTensor) -> Held:
    """Describe this rank's part of ``value``.

    Raises ``TypeError`` or ``ValueError`` for tensors that have no plain bytes.
    """
    if isinstance(value, ReadTensor):
        return Held(name, dtype_name(value.dtype), value.shape, _whole(value.shape))
    shape, dtype = form_of(name, value)
    if isinstance(value, ShardedPiece):
        return Held(name, dtype, shape, tuple(box for box in value.boxes if box.numel))
    return Held(name, dtype, shape, _whole(shape))


def marked(held: Held, value: Tensor | ShardedPiece | ReadTensor) -> Held:
    """Add marks to the description of ``value``, by which ranks detect differing copies."""
    if isinstance(value, ReadTensor):
        return held
    tensors = (part for _, part in parts(value)) if isinstance(value, ShardedPiece) else (value,)
    few = (_first(tensor.detach()) for tensor in tensors if tensor.numel())
    begin = algorithm(OURS)
    marks = tuple(begin(view).intdigest() for view in byte_views(few))
    return Held(held.name, held.dtype, held.shape, held.boxes, marks)


def _first(tensor: Tensor) -> Tensor:
    """Return a view of the first values of ``tensor``; of its first row if not contiguous."""
    while tensor.ndim > 1 and not tensor.is_contiguous():
        tensor = tensor[0]
    return tensor.view(-1)[: _MARKED // tensor.element_size()]


@lru_cache
def _whole(shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The boxes of a full tensor: one, or none without elements."""
    return (Box.whole(shape),) if math.prod(shape) else ()


def form_of(name: str, value: Tensor | ShardedPiece) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of the full tensor; raises as `describe`."""
    if type(name) is not str:
        raise TypeError(f"expected names that are strings, found {name!r}")
    sharded = isinstance(value, ShardedPiece)
    tensor = value.tensor if sharded else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r}: expected a tensor, found {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name!r}: expected a plain tensor, found {type(tensor).__name__};"
            " pass its local tensor in a ShardedPiece"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"{name!r}: a {tensor.layout} tensor on {tensor.device} has no plain bytes"
        )
    try:
        dtype = _saved_dtype(tensor.dtype)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return value.global_shape if sharded else tuple(tensor.shape), dtype


@lru_cache
def _saved_dtype(dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    item_size(name)
    return name


def boxes_of(value: Tensor | ShardedPiece) -> tuple[Box, ...]:
    return value.boxes if isinstance(value, ShardedPiece) else (Box.whole(value.shape),)


def parts(value: ShardedPiece) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes, each with its elements as a 1-D tensor (a view if strides allow).

    Boxes without elements are left out.
    """
    flat = value.tensor.detach().reshape(-1)
    position = 0
    for box in value.boxes:
        if box.numel:
            yield box, flat[position : position + box.numel]
        position += box.numel


def is_plain_host(tensor: Tensor) -> bool:
    """Whether ``tensor`` is contiguous host memory, without lazy conjugation or negation."""
    return (
        tensor.device == _HOST
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """View the bytes of a contiguous host tensor, which must outlive the view.

    Ten times as fast as a NumPy view, and works for dtypes that NumPy lacks.
    """
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def byte_views(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield views of the bytes of tensors; each is valid until the next is requested.

    Device tensors are copied through pinned memory, each while the previous one is used.
    """
    coming: tuple[Tensor, DeviceEvent | None] | None = None
    for tensor in tensors:
        before, coming = coming, _started(tensor)
        del tensor  # do not keep a tensor alive while the next is read
        if before is not None:
            yield _bytes(*before)
            del before
        if coming[1] is None:
            yield _bytes(*coming)
            coming = None
    if coming is not None:
        yield _bytes(*coming)


def _started(tensor: Tensor) -> tuple[Tensor, DeviceEvent | None]:
    """Start to copy ``tensor`` to the host if it is on a device."""
    if is_plain_host(tensor):
        return tensor, None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device == _HOST:
        return plain, None
    here = plain.to("cpu", non_blocking=True)  # pinned, as torch makes it for this
    return here, record(plain.device)


def _bytes(here: Tensor, event: DeviceEvent | None) -> memoryview:
    if event is not None:
        event.synchronize()
    return memoryview(memory_of(here))


def held_to_rows(held: Iterable[Held]) -> list[Any]:
    return [(*row[:3], [(b.offset, b.shape) for b in row.boxes], row.marks) for row in held]


def held_from_rows(rows: Iterable[Any]) -> list[Held]:
    return [
        Held(name, dtype, tuple(shape), tuple(Box(tuple(o), tuple(s)) for o, s in boxes), marks)
        for name, dtype, shape, boxes, marks in rows
    ]


class Assigned(NamedTuple):
    """The writers of all boxes."""

    known: dict[str, Held]
    """All tensors, by name."""
    chosen: list[list[tuple[str, Box]]]
    """The boxes that each rank writes."""
    parted: list[list[str]]
    """For each rank, the tensors that it writes although other ranks have other values."""


def assign(held: Iterable[Sequence[Held]]) -> Assigned:
    """Assign writers to boxes.

    A single holder writes its box; of several with different marks the first does. All other boxes
    are assigned in order of size, each to its holder with the fewest bytes so far, the lowest rank
    among equals. Raises ``ValueError`` if ranks disagree about dtype or shape.
    """
    known: dict[str, tuple[Held, int]] = {}
    holders: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    marks: defaultdict[tuple[str, Box], set[int]] = defaultdict(set)
    chosen: list[list[tuple[str, Box]]] = []
    parted: list[list[str]] = []
    for rank, rows in enumerate(held):
        chosen.append([])
        parted.append([])
        for row in rows:
            first, first_rank = known.setdefault(row.name, (row, rank))
            if first is not row and (first.dtype, first.shape) != (row.dtype, row.shape):
                raise ValueError(
                    f"{row.name!r} is {first.dtype} {first.shape} on rank {first_rank}"
                    f" and {row.dtype} {row.shape} on rank {rank}"
                )
            for box in row.boxes:
                holders[row.name, box].append(rank)
            for box, mark in zip(row.boxes, row.marks, strict=False):  # some have none
                marks[row.name, box].add(mark)

    def size(item: tuple[str, Box]) -> int:
        return item[1].numel * item_size(known[item[0]][0].dtype)

    shared: list[tuple[str, Box]] = []
    for item, ranks in holders.items():
        is_parted = len(marks.get(item, ())) > 1
        (chosen[ranks[0]] if is_parted or len(ranks) == 1 else shared).append(item)
        if is_parted:
            parted[ranks[0]].append(item[0])
    load = [sum(map(size, items)) if shared else 0 for items in chosen]
    for item in sorted(shared, key=lambda at: (-size(at), at[0], at[1].offset, at[1].shape)):
        writer = min(holders[item], key=lambda rank: (load[rank], rank))
        load[writer] += size(item)
        chosen[writer].append(item)
    return Assigned({name: known[name][0] for name in sorted(known)}, chosen, parted)


def with_keys(
    rank: int, items: Iterable[tuple[str, Box]], tensors: Mapping[str, Held]
) -> list[NamedPiece]:
    """Name each box inside its file: a full tensor by its own name, a part by its ranges."""
    taken = {"__metadata__"}  # reserved by safetensors
    file = file_name(rank)
    found: list[NamedPiece] = []
    for name, box in sorted(items, key=lambda at: (at[0], at[1].offset)):
        key = name
        if box.shape != tensors[name].shape:
            key = f"{name}[{','.join(box.ranges())}]"
        while key in taken:
            key += "'"
        taken.add(key)
        found.append((name, Piece(file, key, box, 0)))
    return found
