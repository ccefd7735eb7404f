"""Tensors as a checkpoint sees them: plain or held in boxes, and who of several holders writes.

A rank hands over what it holds. Two ranks may hold the same box (replicas); it is written once, by
the holder with the least to write so far, a choice that every rank computes alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.document import JSON, Fields
from meshwright.checkpoint.manifest import Piece
from meshwright.checkpoint.tensor_file import DTYPES, file_name, item_size
from meshwright.comm.streams import Event, is_host, record
from meshwright.layout import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedPiece:
    """The part of a global tensor that this rank holds.

    ``tensor`` holds the elements of ``boxes`` one box after the other, each row-major. For a shard
    of a flat buffer that is the 1-D shard with ``layout.boxes(shape, start, stop)``; for a chunk
    along a dim it is the chunk with its one box. A rank that holds nothing passes no boxes and an
    empty tensor.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: Tensor

    def __post_init__(self) -> None:
        whole = Box.whole(self.global_shape)
        for box in self.boxes:
            is_alike = len(box.shape) == len(whole.shape)
            if not is_alike or (box.numel and box.intersect(whole) != box):
                raise ValueError(f"{box} does not lie in global_shape {self.global_shape}")
        expected = sum(box.numel for box in self.boxes)
        if self.tensor.numel() != expected:
            raise ValueError(
                f"expected a tensor of {expected} elements for boxes {self.boxes},"
                f" found shape {tuple(self.tensor.shape)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadTensor:
    """A whole tensor that is read when it is written: ranks that list it share the work."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def flat(self) -> Tensor:
        """Read its elements. Raises ``ValueError`` where they are not as described."""
        found = self.read()
        if (tuple(found.shape), found.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"expected a tensor of {self.dtype} {self.shape}, read {found.dtype} "
                f"{tuple(found.shape)}"
            )
        return found.detach().reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The part of one tensor that one rank holds, without the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


NamedPiece = tuple[str, Piece]
"""A piece after the name of its tensor; its checksum is not known yet."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype: ``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype by name. Raises ``ValueError`` if this torch does not have it."""
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return dtype


def describe(name: str, value: Tensor | ShardedPiece | ReadTensor) -> Held:
    """Describe the part of ``value`` that this rank holds.

    Raises ``TypeError`` or ``ValueError`` for tensors that have no plain bytes.
    """
    if type(name) is not str:
        raise TypeError(f"expected names that are strings, found {name!r}")
    if isinstance(value, ReadTensor):
        boxes = (Box.whole(value.shape),) if math.prod(value.shape) else ()
        return Held(name=name, dtype=dtype_name(value.dtype), shape=value.shape, boxes=boxes)
    tensor = value.tensor if isinstance(value, ShardedPiece) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r}: expected a tensor, found {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name!r}: expected a plain tensor, found {type(tensor).__name__};"
            " pass its local tensor in a ShardedPiece"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(
            f"{name!r}: a {tensor.layout} tensor on {tensor.device} has no plain bytes"
        )
    dtype = dtype_name(tensor.dtype)
    try:
        item_size(dtype)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    shape = value.global_shape if isinstance(value, ShardedPiece) else value.shape
    boxes = tuple(box for box in boxes_of(value) if box.numel)
    return Held(name=name, dtype=dtype, shape=tuple(shape), boxes=boxes)


def boxes_of(value: Tensor | ShardedPiece) -> tuple[Box, ...]:
    """List the boxes held; of a plain tensor it is the whole."""
    return value.boxes if isinstance(value, ShardedPiece) else (Box.whole(value.shape),)


def parts(value: ShardedPiece) -> Iterator[tuple[Box, Tensor]]:
    """List the boxes held, each with its elements as a 1-D tensor (a view where memory allows).

    Boxes without elements are left out.
    """
    flat = value.tensor.detach().reshape(-1)
    position = 0
    for box in value.boxes:
        if box.numel:
            yield box, flat[position : position + box.numel]
        position += box.numel


def byte_views(flats: Iterable[Tensor]) -> Iterator[memoryview]:
    """View the bytes of 1-D tensors one by one; views of memory that is plain and of the host.

    Those of a device come through pinned memory, the next one while one is used.
    """
    coming: tuple[Tensor, Event | None] | None = None
    for flat in flats:
        before, coming = coming, _started(flat.resolve_conj().resolve_neg().contiguous())
        del flat  # what was read to be written is not kept while the next is
        if before is not None:
            yield _bytes(*before)
        if coming[1] is None:
            yield _bytes(*coming)
            coming = None
    if coming is not None:
        yield _bytes(*coming)


def _started(plain: Tensor) -> tuple[Tensor, Event | None]:
    """Start to copy ``plain`` to the host, where it lies elsewhere."""
    if is_host(plain.device):
        return plain, None
    here = plain.to("cpu", non_blocking=True)  # pinned, as torch makes it for this
    return here, record(plain.device)


def _bytes(here: Tensor, event: Event | None) -> memoryview:
    if event is not None:
        event.synchronize()
    return here.view(torch.uint8).numpy().data


def held_to_json(held: Held) -> JSON:
    """Write a row for the other ranks."""
    boxes: list[JSON] = [[list(box.offset), list(box.shape)] for box in held.boxes]
    return {"name": held.name, "dtype": held.dtype, "shape": list(held.shape), "boxes": boxes}


def held_from_json(value: JSON) -> Held:
    """Read a row that another rank has written."""
    fields = Fields(value, "description of a tensor")
    boxes: list[Box] = []
    for pair in fields.items("boxes"):
        offset, shape = pair if isinstance(pair, list) else (None, None)
        corner = Fields({"offset": offset, "shape": shape}, "box")
        boxes.append(Box(corner.counts("offset"), corner.counts("shape")))
    return Held(
        name=fields.text("name"),
        dtype=fields.text("dtype"),
        shape=fields.counts("shape"),
        boxes=tuple(boxes),
    )


def assign(held: Sequence[Sequence[Held]]) -> tuple[dict[str, Held], list[list[NamedPiece]]]:
    """Assign writers: all tensors by name, and the pieces that each rank writes, by name.

    The largest boxes are given away first, each to its holder with the fewest bytes so far, the
    lowest rank among equals. Raises ``ValueError`` where ranks disagree about dtype or shape.
    """
    known: dict[str, tuple[Held, int]] = {}
    holders: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, rows in enumerate(held):
        for row in rows:
            first, first_rank = known.setdefault(row.name, (row, rank))
            if (first.dtype, first.shape) != (row.dtype, row.shape):
                raise ValueError(
                    f"{row.name!r} is {first.dtype} {first.shape} on rank {first_rank}"
                    f" and {row.dtype} {row.shape} on rank {rank}"
                )
            for box in row.boxes:
                holders[row.name, box].append(rank)
    sizes = {(name, box): box.numel * item_size(known[name][0].dtype) for name, box in holders}
    load = [0] * len(held)
    chosen: list[list[tuple[str, Box]]] = [[] for _ in held]
    for item in sorted(holders, key=lambda at: (-sizes[at], at[0], at[1].offset, at[1].shape)):
        writer = min(holders[item], key=lambda rank: (load[rank], rank))
        load[writer] += sizes[item]
        chosen[writer].append(item)
    tensors = {name: known[name][0] for name in sorted(known)}
    return tensors, [_with_keys(rank, items, tensors) for rank, items in enumerate(chosen)]


def _with_keys(
    rank: int, items: Sequence[tuple[str, Box]], tensors: Mapping[str, Held]
) -> list[NamedPiece]:
    """Name each box inside its file: a whole tensor by its own name, a part with its ranges."""
    taken = {"__metadata__"}  # reserved by safetensors
    found: list[NamedPiece] = []
    for name, box in sorted(items, key=lambda at: (at[0], at[1].offset)):
        key = name
        if box.shape != tensors[name].shape:
            key = f"{name}[{','.join(box.ranges())}]"
        while key in taken:
            key += "'"
        taken.add(key)
        found.append((name, Piece(file=file_name(rank), key=key, box=box, checksum=0)))
    return found
