"""The elements that each rank holds: boxes of tensors, placements over axes, and flat packing.

A ``TensorLayout`` says which box of one tensor each rank holds. A ``FlatLayout`` packs several
tensors into one line of elements and cuts the line into equal parts::

    tensors       a: (3, 2)        b: (5,)           FlatLayout.pack(..., parts=4)
    line      |a0 a1 a2 a3 a4 a5 b0 b1 b2 b3 b4 --|  numel 11, padded_size 12, shard_size 3
    parts     |   0    |    1   |    2   |    3   |
    owned(1)            a[3:6]                       = boxes (1, 1)+(1, 1) and (2, 0)+(1, 2) of a
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwright.axes import Axes
from meshwright.errors import LayoutError

__all__ = [
    "ITEMSIZE",
    "Box",
    "ChunkedLayout",
    "FlatLayout",
    "Partial",
    "Piece",
    "Placement",
    "Replicate",
    "Shard",
    "TensorLayout",
    "boxes",
    "chunk",
    "dtype_bytes",
    "overlap",
]

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "uint16": 2,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint32": 4,
        "int32": 4,
        "float32": 4,
        "complex32": 4,
        "uint64": 8,
        "int64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Bytes of one element, by the name of the dtype."""


def dtype_bytes(name: str) -> int:
    """Bytes of one element of the dtype called ``name``, such as ``"float32"``."""
    try:
        return ITEMSIZE[name]
    except KeyError:
        known = ", ".join(sorted(ITEMSIZE))
        raise LayoutError(f"unknown dtype {name!r}; known dtypes: {known}") from None


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: where it begins and how large it is, per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError(
                f"expected offset and shape of the same length, found {self.offset} "
                f"and {self.shape}"
            )
        if any(n < 0 for n in self.offset) or any(n < 0 for n in self.shape):
            raise LayoutError(f"expected no negative numbers, found {self.offset}, {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Make the box of all elements of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a box without dims."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Find the elements in both boxes, or ``None`` when there are none."""
        if len(self.shape) != len(other.shape):
            raise LayoutError(f"boxes of different tensors: {self} and {other}")
        start = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        stop = tuple(min(a + m, b + n) for a, m, b, n in ends)
        if any(i >= j for i, j in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(j - i for i, j in zip(start, stop, strict=True)))

    def ranges(self) -> list[str]:
        """Write the range of each dim, such as ``"2:5"``."""
        return [f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True)]

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Slices that select this box from the whole tensor, or from one that holds ``within``."""
        moved = list(self.offset)
        if within is not None:
            moved = [o - w for o, w in zip(self.offset, within.offset, strict=True)]
            limits = zip(moved, self.shape, within.shape, strict=True)
            if any(m < 0 or m + n > limit for m, n, limit in limits):
                raise LayoutError(f"expected a box inside {within}, found {self}")
        return tuple(slice(m, m + n) for m, n in zip(moved, self.shape, strict=True))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """List the boxes of the elements ``start`` to ``stop`` (exclusive) of a row-major tensor.

    At most ``2 * ndim - 1`` boxes (one for a tensor without dims), disjoint, in flat order: the
    row-major elements of one box after the other are exactly the range. Per dim they are the rest
    of a row already begun, whole rows, and the beginning of a last row.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise LayoutError(
            f"expected a range within 0 to {numel} for shape {shape}, found {start} to {stop}"
        )
    return _boxes(shape, start, stop) if start < stop else []


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if len(shape) <= 1:
        return [Box((start,) * len(shape), (stop - start,) * len(shape))]
    rest = shape[1:]
    row = math.prod(rest)
    first, begun = divmod(start, row)
    last, ending = divmod(stop, row)
    if first == last:
        return _in_row(first, _boxes(rest, begun, ending))
    found: list[Box] = []
    if begun:
        found += _in_row(first, _boxes(rest, begun, row))
        first += 1
    if first < last:
        found.append(Box((first,) + (0,) * len(rest), (last - first, *rest)))
    if ending:
        found += _in_row(last, _boxes(rest, 0, ending))
    return found


def _in_row(row: int, inner: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in inner]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same values."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Each coordinate of the axis holds one chunk along ``dim``; see ``chunk``."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Partial:
    """Each coordinate holds a summand; the value is the ``reduction`` over the axis."""

    reduction: str = "sum"


Placement = Replicate | Shard | Partial
"""How one tensor lies along one axis."""


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk ``index`` of a dim of ``size`` in ``parts``, by torch's rule.

    Chunks have ``ceil(size / parts)`` rows; the last may be shorter and later ones empty: 5 rows
    in 4 parts give 2, 2, 1, 0.
    """
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The boxes of one tensor, one for each rank.

    Shards are taken in the order of the axes, so two axes may shard the same dim: the second cuts
    the chunk of the first. An axis without a placement replicates.
    """

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    axes: Axes
    placements: Mapping[str, Placement] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        for axis, placement in self.placements.items():
            if axis not in self.axes.names:
                raise LayoutError(
                    f"{self.name!r} is placed on axis {axis!r}, but the axes are {self.axes}"
                )
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise LayoutError(
                    f"{self.name!r} of shape {self.shape} cannot be sharded along dim "
                    f"{placement.dim} on axis {axis!r}; dims are counted from 0"
                )

    def placement(self, axis: str) -> Placement:
        """Find the placement along one axis."""
        return self.placements.get(axis, Replicate())

    def box(self, rank: int) -> Box:
        """Find the box that ``rank`` holds; empty where there are more parts than chunks."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for axis, index in self.axes.coordinate(rank).items():
            placement = self.placement(axis)
            if isinstance(placement, Shard):
                dim = placement.dim
                start, length = chunk(shape[dim], self.axes.size(axis), index)
                offset[dim] += start
                shape[dim] = length
        return Box(tuple(offset), tuple(shape))

    def first_holder(self, rank: int) -> int:
        """Find the lowest rank that is at the same place on every sharded axis.

        It holds the same box, so that each box is written once when only first holders write.
        """
        sharded = {
            axis: index
            for axis, index in self.axes.coordinate(rank).items()
            if isinstance(self.placement(axis), Shard)
        }
        return self.axes.rank(sharded)


def overlap(a: TensorLayout, rank_a: int, b: TensorLayout, rank_b: int) -> Box | None:
    """Find the elements that ``rank_a`` holds under ``a`` and ``rank_b`` under ``b``; ``None`` if
    none.

    In coordinates of the whole tensor; ``Box.slices(within=layout.box(rank))`` makes them local.
    """
    if a.shape != b.shape:
        raise LayoutError(
            f"two layouts of one tensor differ in shape: {a.name!r} {a.shape}, {b.name!r} {b.shape}"
        )
    return a.box(rank_a).intersect(b.box(rank_b))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one tensor that lies in one shard of a flat line."""

    index: int
    """Which tensor, in the order of the layout."""
    start: int
    """First element, counted in the flattened tensor."""
    stop: int
    """One past the last element, counted in the flattened tensor."""
    offset: int
    """Where ``start`` lies in the shard."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Tensors packed into one line of elements, cut into ``parts`` shards of equal size.

    Made by ``pack``. Pure integers, equal on all ranks. Sizes and alignments count elements.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    parts: int
    offsets: tuple[int, ...]
    """Where each tensor begins in the line."""
    extent: int
    """One past the last element of the last tensor, gaps between tensors included."""
    shard_size: int
    """Elements of one shard, padding included."""

    @classmethod
    def pack(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        parts: int,
        *,
        shard_alignment: int = 1,
        tensor_alignment: int = 1,
    ) -> FlatLayout:
        """Pack tensors in the given order.

        Each tensor begins at a multiple of ``tensor_alignment`` and each shard has a multiple of
        ``shard_alignment`` elements. A shard may end within a tensor, at any element.
        """
        _check_packing(names, shapes, parts, (shard_alignment, tensor_alignment))
        dtype_bytes(dtype)
        offsets: list[int] = []
        end = 0
        for shape in shapes:
            offsets.append(_round_up(end, tensor_alignment))
            end = offsets[-1] + math.prod(shape)
        return cls(
            names=tuple(names),
            shapes=tuple(tuple(shape) for shape in shapes),
            dtype=dtype,
            parts=parts,
            offsets=tuple(offsets),
            extent=end,
            shard_size=_round_up(-(-end // parts), shard_alignment),
        )

    @staticmethod
    def chunked(
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        parts: int,
        *,
        dims: Sequence[int] | None = None,
    ) -> ChunkedLayout:
        """Cut each tensor along a dim of its own (dim 0 when None); see `ChunkedLayout`."""
        _check_packing(names, shapes, parts, (1, 1))
        dtype_bytes(dtype)
        dims = tuple(dims) if dims is not None else (0,) * len(names)
        _check_dims(names, shapes, dims)
        offsets: list[int] = []
        end = 0
        for shape, dim in zip(shapes, dims, strict=True):
            offsets.append(end)
            rows = -(-shape[dim] // parts)
            end += rows * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        return ChunkedLayout(
            names=tuple(names),
            shapes=tuple(tuple(shape) for shape in shapes),
            dims=dims,
            dtype=dtype,
            parts=parts,
            offsets=tuple(offsets),
            shard_size=end,
        )

    @property
    def numel(self) -> int:
        """Elements of all tensors, without gaps and padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padded_size(self) -> int:
        """Elements of the whole line: ``parts * shard_size``."""
        return self.parts * self.shard_size

    def range(self, index: int) -> tuple[int, int]:
        """First element and one past the last of tensor ``index``, counted in the line."""
        start = self.offsets[index]
        return start, start + math.prod(self.shapes[index])

    def shard_range(self, part: int) -> tuple[int, int]:
        """First element and one past the last of shard ``part``, counted in the line."""
        if not 0 <= part < self.parts:
            raise LayoutError(f"expected a part from 0 to {self.parts - 1}, found {part}")
        return part * self.shard_size, (part + 1) * self.shard_size

    def owned(self, part: int) -> tuple[Piece, ...]:
        """List the pieces of tensors that lie in shard ``part``, in order; none for empty
        tensors.
        """
        begin, end = self.shard_range(part)
        pieces: list[Piece] = []
        for index in range(max(bisect_right(self.offsets, begin) - 1, 0), len(self.offsets)):
            first, last = self.range(index)
            if first >= end:
                break
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                pieces.append(Piece(index, start - first, stop - first, start - begin))
        return tuple(pieces)

    def boxes(self, piece: Piece) -> list[Box]:
        """List the boxes of the piece in its tensor; see the function ``boxes``."""
        return boxes(self.shapes[piece.index], piece.start, piece.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLayout:
    """Tensors cut along one dim each; a shard is one chunk of every tensor, one after another.

    Made by `FlatLayout.chunked`. Each slot of a shard has room for the largest chunk of its tensor,
    so all shards are equally large, and short chunks leave the end of their slot empty::

        tensors   a: (3, 2)   b: (4,)        FlatLayout.chunked(..., parts=2)
        shard 0   |a00 a01 a10 a11|b0 b1|    offsets (0, 4), shard_size 6
        shard 1   |a20 a21  -   - |b2 b3|
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    """Along which dim each tensor is cut."""
    dtype: str
    parts: int
    offsets: tuple[int, ...]
    """Where the slot of each tensor begins in every shard."""
    shard_size: int
    """Elements of one shard, padding included."""

    @property
    def numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padded_size(self) -> int:
        """Elements of all shards together."""
        return self.parts * self.shard_size

    @property
    def padding(self) -> float:
        """Elements of padding for each element of a tensor."""
        return self.padded_size / self.numel - 1.0 if self.numel else 0.0

    @property
    def slots(self) -> tuple[int, ...]:
        """Elements of each slot."""
        ends = (*self.offsets[1:], self.shard_size)
        return tuple(end - start for start, end in zip(self.offsets, ends, strict=True))

    def box(self, index: int, part: int) -> Box:
        """Find the box of tensor ``index`` that lies in shard ``part``; empty where chunks run
        out.
        """
        if not 0 <= part < self.parts:
            raise LayoutError(f"expected a part from 0 to {self.parts - 1}, found {part}")
        shape, dim = self.shapes[index], self.dims[index]
        start, length = chunk(shape[dim], self.parts, part)
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        return Box(offset, tuple(length if d == dim else n for d, n in enumerate(shape)))

    def owned(self, part: int) -> tuple[tuple[int, Box], ...]:
        """List the tensors and boxes in shard ``part``, in order; none for empty chunks."""
        boxes_of_part = ((index, self.box(index, part)) for index in range(len(self.names)))
        return tuple((index, box) for index, box in boxes_of_part if box.numel)


def _check_dims(names: Sequence[str], shapes: Sequence[Sequence[int]], dims: Sequence[int]) -> None:
    if len(dims) != len(names):
        raise LayoutError(
            f"expected one dim for each tensor, found {len(dims)} for {len(names)} tensors"
        )
    for name, shape, dim in zip(names, shapes, dims, strict=True):
        if not 0 <= dim < len(shape):
            raise LayoutError(
                f"{name!r} of shape {tuple(shape)} has no dim {dim} to be cut along; dims are "
                "counted from 0"
            )


def _check_packing(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    parts: int,
    alignments: tuple[int, int],
) -> None:
    if len(names) != len(shapes):
        raise LayoutError(
            f"expected one shape for each name, found {len(names)} names and {len(shapes)} shapes"
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise LayoutError(f"expected each tensor once, found {', '.join(twice)} more than once")
    if parts < 1 or min(alignments) < 1:
        raise LayoutError(
            f"expected at least 1 part and alignments of at least 1, found {parts} parts and "
            f"alignments {alignments}"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
