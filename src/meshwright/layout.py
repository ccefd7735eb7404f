"""Which elements each rank holds: boxes of tensors, placements over axes, and flat packing.

A ``FlatLayout`` packs several tensors into one flat buffer and cuts it into equal parts::

    tensors       a: (3, 2)        b: (5,)           FlatLayout.pack(..., parts=4)
    buffer    |a0 a1 a2 a3 a4 a5 b0 b1 b2 b3 b4 --|  numel 11, padded_size 12, shard_size 3
    parts     |   0    |    1   |    2   |    3   |
    owned(1)            a[3:6]                       = boxes (1, 1)+(1, 1) and (2, 0)+(1, 2) of a
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import LayoutError
from meshwright.precision import dtype_bytes

ALIGNMENT = 16
"""Chunks begin at multiples of so many elements: at least 16 bytes in every dtype, as vector loads
and matrix units of devices require."""


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
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
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
        """Format the range of each dim, such as ``"2:5"``."""
        return [f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True)]

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Make slices that select this box from the whole tensor, or one that holds ``within``."""
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
    row-major elements of all boxes, one after another, are exactly the range. Per dim they are the
    rest of a first row, whole rows, and the beginning of a last row.
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
    """Each coordinate holds a partial value; the value is the ``reduction`` over the axis."""

    reduction: str = "sum"


Placement = Replicate | Shard | Partial
"""How one tensor is placed along one axis."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the strides of a tensor of ``shape`` whose last dim varies fastest."""
    if len(shape) < 2:
        return (1,) * len(shape)
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk ``index`` of a dim of ``size`` in ``parts``, by torch's rule.

    Chunks have ``ceil(size / parts)`` rows; the last may be shorter and later ones empty: 5 rows
    in 4 parts give 2, 2, 1, 0.
    """
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The part of one tensor that is in one shard of a flat buffer."""

    index: int
    """Index of the tensor, in the order of the layout."""
    start: int
    """First element, counted in the flattened tensor."""
    stop: int
    """One past the last element, counted in the flattened tensor."""
    offset: int
    """Place of ``start`` in the shard."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one tensor that is in one shard, a contiguous range of the shard."""

    index: int
    """Index of the tensor, in the order of the layout."""
    offset: int
    """Start of the range in the shard."""
    shape: tuple[int, ...]
    """Shape of this part."""
    of: tuple[int, ...]
    """Shape in which the whole tensor is split: its own, or ``(-1,)``, flattened."""
    dim: int
    """The dim of ``of`` along which it is split."""
    start: int
    """First index along ``dim`` in this part; the other dims are complete."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return slices that select this part from the whole tensor, viewed in the shape ``of``."""
        stop = self.start + self.shape[self.dim]
        return (*(slice(None),) * self.dim, slice(self.start, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLayout(ABC):
    """Tensors in one flat buffer, split into ``parts`` shards of equal size.

    Holds no tensors; equal on all ranks.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    parts: int
    offsets: tuple[int, ...]
    """Start of each tensor: in the buffer when packed, in every shard when chunked."""
    shard_size: int
    """Elements of one shard, padding included."""

    @property
    def numel(self) -> int:
        """Elements of all tensors, without gaps and padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padded_size(self) -> int:
        """Elements of the whole buffer: ``parts * shard_size``."""
        return self.parts * self.shard_size

    @property
    def cuts_dims(self) -> bool:
        """True if each tensor is split along a dim, False if tensors are split at any element."""
        return False

    @property
    def is_gathered_whole(self) -> bool:
        """True where the concatenated shards are the whole tensors, without reordering."""
        return True

    def together(self, least: float) -> int:
        """Count the tensors that are gathered together.

        The others, at the end of the buffer, have at least ``least`` elements and are split along
        dim 0: each is gathered on its own, directly into its place.
        """
        return len(self.names)

    def whole_start(self, index: int) -> int:
        """First element of tensor ``index`` in the buffer of whole tensors, with their padding."""
        return self.offsets[index]

    def stretch(self, indices: range) -> tuple[int, int]:
        """First element of the tensors ``indices`` (one or more) in a shard, and one past the last.

        Besides them, this range has only gaps.
        """
        return 0, self.shard_size

    def is_even(self, index: int) -> bool:
        """True where all shards have equally many whole rows of tensor ``index``."""
        return False

    @abstractmethod
    def cuts(self, part: int) -> Iterator[Cut]:
        """List the parts in shard ``part``, in order, without empty ones."""

    @abstractmethod
    def stretches(self, index: int) -> Iterator[tuple[int, Cut]]:
        """List the ranges of tensor ``index``, each with the shard that its offset counts in."""

    @abstractmethod
    def own_range(self, index: int, part: int) -> tuple[int, int]:
        """First element of tensor ``index`` in shard ``part`` and one past the last."""

    def packed_layout(self) -> FlatLayout:
        """Return this as a `FlatLayout`; raises LayoutError where tensors are cut in chunks."""
        raise LayoutError("expected tensors packed in one line, found a chunk of each in a shard")

    def chunked_layout(self) -> ChunkedLayout:
        """Return this as a `ChunkedLayout`; raises LayoutError where tensors are packed."""
        raise LayoutError("expected a chunk of each tensor in a shard, found tensors packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout(LineLayout):
    """Tensors packed into one buffer, which is cut at any element. Made by ``pack``."""

    extent: int
    """One past the last element of the last tensor, gaps between tensors included."""

    @classmethod
    def pack(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        parts: int,
        *,
        tensor_alignment: int = 1,
    ) -> FlatLayout:
        """Pack tensors in the given order.

        Each tensor begins at a multiple of ``tensor_alignment``. A shard may end within a tensor,
        at any element.
        """
        _check_packing(names, shapes, parts, tensor_alignment)
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
            shard_size=-(-end // parts),
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
        """Cut each tensor along its own dim (dim 0 when None); see `ChunkedLayout`."""
        _check_packing(names, shapes, parts)
        dtype_bytes(dtype)
        dims = tuple(dims) if dims is not None else (0,) * len(names)
        _check_dims(names, shapes, dims)
        sizes = [_largest_chunk(s, dim, parts) for s, dim in zip(shapes, dims, strict=True)]
        offsets: list[int] = []
        end = 0
        for size in sizes:
            offsets.append(_round_up(end, ALIGNMENT))
            end = offsets[-1] + size
        return ChunkedLayout(
            names=tuple(names),
            shapes=tuple(tuple(shape) for shape in shapes),
            dims=dims,
            dtype=dtype,
            parts=parts,
            offsets=tuple(offsets),
            sizes=tuple(sizes),
            shard_size=end,
        )

    def packed_layout(self) -> FlatLayout:
        """Return itself."""
        return self

    def cuts(self, part: int) -> Iterator[Cut]:
        """List the pieces, 1-D, of tensors in shard ``part``."""
        for piece in self.owned(part):
            yield Cut(piece.index, piece.offset, (piece.numel,), (-1,), 0, piece.start)

    def own_range(self, index: int, part: int) -> tuple[int, int]:
        """See `LineLayout`."""
        (begin, end), (first, last) = self.shard_range(part), self.range(index)
        start, stop = max(first, begin), min(last, end)
        return (start - begin, stop - begin) if start < stop else (0, 0)

    def stretches(self, index: int) -> Iterator[tuple[int, Cut]]:
        """List the only range; its offset counts from the start of the buffer."""
        yield 0, Cut(index, self.offsets[index], self.shapes[index], self.shapes[index], 0, 0)

    def range(self, index: int) -> tuple[int, int]:
        """First element and one past the last of tensor ``index``, counted in the buffer."""
        start = self.offsets[index]
        return start, start + math.prod(self.shapes[index])

    def shard_range(self, part: int) -> tuple[int, int]:
        """First element and one past the last of shard ``part``, counted in the buffer."""
        if not 0 <= part < self.parts:
            raise LayoutError(f"expected a part from 0 to {self.parts - 1}, found {part}")
        return part * self.shard_size, (part + 1) * self.shard_size

    def owned(self, part: int) -> tuple[FlatPiece, ...]:
        """List the pieces of tensors in shard ``part``, in order, without empty ones."""
        begin, end = self.shard_range(part)
        pieces: list[FlatPiece] = []
        for index in range(max(bisect_right(self.offsets, begin) - 1, 0), len(self.offsets)):
            first, last = self.range(index)
            if first >= end:
                break
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                pieces.append(FlatPiece(index, start - first, stop - first, start - begin))
        return tuple(pieces)

    def boxes(self, piece: FlatPiece) -> list[Box]:
        """List the boxes of the piece in its tensor; see the function ``boxes``."""
        return boxes(self.shapes[piece.index], piece.start, piece.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLayout(LineLayout):
    """Tensors cut along one dim each; a shard is one chunk of every tensor, one after another.

    Made by `FlatLayout.chunked`. Each slot of a shard has room for the largest chunk of its tensor,
    so all shards are equally large, and short chunks leave the end of their slot empty. Slots begin
    at multiples of `ALIGNMENT` elements, and so do the whole tensors::

        tensors   a: (3, 2)   b: (4,)               FlatLayout.chunked(..., parts=2)
        shard 0   |a00 a01 a10 a11| 12 - |b0 b1|    offsets (0, 16), sizes (4, 2), shard_size 18
        shard 1   |a20 a21  -   - | 12 - |b2 b3|
    """

    dims: tuple[int, ...]
    """The dim along which each tensor is split."""
    sizes: tuple[int, ...]
    """Elements of the largest chunk of each tensor."""

    @property
    def padding(self) -> float:
        """Padding of short chunks as a fraction of all elements.

        The gaps before slots, of at most 15 elements, do not count.
        """
        return self.parts * sum(self.sizes) / self.numel - 1.0 if self.numel else 0.0

    @property
    def cuts_dims(self) -> bool:
        """True."""
        return True

    @property
    def is_gathered_whole(self) -> bool:
        """True for one shard, and for one tensor that is cut along dim 0."""
        return self.parts == 1 or (len(self.names) == 1 and self.dims[0] == 0)

    def chunked_layout(self) -> ChunkedLayout:
        """Return itself."""
        return self

    def together(self, least: float) -> int:
        """See `LineLayout`."""
        count, sizes = len(self.names), self.sizes
        while count and not self.dims[count - 1] and sizes[count - 1] * self.parts >= least:
            count -= 1
        return count

    def whole_start(self, index: int) -> int:
        """See `LineLayout`."""
        return self.offsets[index] * self.parts

    def own_range(self, index: int, part: int) -> tuple[int, int]:
        """See `LineLayout`."""
        start, shape, dim = self.offsets[index], self.shapes[index], self.dims[index]
        length = chunk(shape[dim], self.parts, part)[1]
        return start, start + length * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])

    def cuts(self, part: int) -> Iterator[Cut]:
        """List the chunks that are not empty in shard ``part``."""
        for index in range(len(self.names)):
            cut = self._cut(index, part)
            if 0 not in cut.shape:
                yield cut

    def is_even(self, index: int) -> bool:
        """See `LineLayout`."""
        return self.dims[index] == 0 and self.shapes[index][0] % self.parts == 0

    def stretches(self, index: int) -> Iterator[tuple[int, Cut]]:
        """List the chunks of tensor ``index`` that are not empty."""
        cuts = ((part, self._cut(index, part)) for part in range(self.parts))
        return ((part, cut) for part, cut in cuts if 0 not in cut.shape)

    def _cut(self, index: int, part: int) -> Cut:
        shape, dim = self.shapes[index], self.dims[index]
        start, length = chunk(shape[dim], self.parts, part)
        cut = (*shape[:dim], length, *shape[dim + 1 :])
        return Cut(index, self.offsets[index], cut, shape, dim, start)

    def stretch(self, indices: range) -> tuple[int, int]:
        """See `LineLayout`."""
        last = indices[-1]
        return self.offsets[indices[0]], self.offsets[last] + self.sizes[last]

    def local_shape(self, index: int, part: int) -> tuple[int, ...]:
        """Return the shape of tensor ``index``'s chunk in shard ``part``."""
        shape, dim = self.shapes[index], self.dims[index]
        return (*shape[:dim], chunk(shape[dim], self.parts, part)[1], *shape[dim + 1 :])

    def box(self, index: int, part: int) -> Box:
        """Return the box of tensor ``index`` in shard ``part``; empty where chunks run out."""
        if not 0 <= part < self.parts:
            raise LayoutError(f"expected a part from 0 to {self.parts - 1}, found {part}")
        shape, dim = self.shapes[index], self.dims[index]
        start, length = chunk(shape[dim], self.parts, part)
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        return Box(offset, tuple(length if d == dim else n for d, n in enumerate(shape)))


def _largest_chunk(shape: Sequence[int], dim: int, parts: int) -> int:
    """Count the elements of the first of ``parts`` chunks along ``dim``: no other is larger."""
    return chunk(shape[dim], parts, 0)[1] * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


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
    names: Sequence[str], shapes: Sequence[Sequence[int]], parts: int, alignment: int = 1
) -> None:
    if len(names) != len(shapes):
        raise LayoutError(
            f"expected one shape for each name, found {len(names)} names and {len(shapes)} shapes"
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise LayoutError(f"expected each tensor once, found {', '.join(twice)} more than once")
    if parts < 1 or alignment < 1:
        raise LayoutError(
            f"expected at least 1 part and an alignment of at least 1, found {parts} parts and "
            f"alignment {alignment}"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
