"""Boxes of flat ranges, placements of tensors, and flat packing, against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from support.internals.layout import ALIGNMENT, Box, Cut, FlatLayout, boxes, chunk
from support.internals.precision import dtype_bytes

Shape = tuple[int, ...]
quick = settings(max_examples=80, deadline=None)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
awkward = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13]), max_size=3).map(tuple)


def elements(box: Box, shape: Shape) -> list[int]:
    """The flat positions in a tensor of ``shape`` that a box holds, in row-major order."""
    grid = itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(i * s for i, s in zip(place, strides, strict=True)) for place in grid]


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(shapes)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(shape_and_range())
@settings(max_examples=300, deadline=None)
def test_boxes_are_the_range_in_flat_order(case: tuple[Shape, int, int]) -> None:
    shape, start, stop = case
    found = boxes(shape, start, stop)
    flat = [element for box in found for element in elements(box, shape)]
    assert flat == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in found)


def test_boxes_of_a_range_as_drawn() -> None:
    assert boxes((3, 4), 2, 11) == [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 3))]
    assert boxes((3, 4), 4, 12) == [Box((1, 0), (2, 4))]
    assert boxes((), 0, 1) == [Box((), ())]
    assert boxes((), 0, 0) == []
    assert boxes((0, 4), 0, 0) == []


def test_the_bound_on_boxes_is_reached() -> None:
    assert len(boxes((3, 3, 3, 3), 1, 80)) == 2 * 4 - 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_boxes_refuse_ranges_outside(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match=f"range within 0 to 6 .* found {start} to {stop}"):
        boxes((2, 3), start, stop)


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))

    def box() -> Box:
        offset = [draw(st.integers(0, n)) for n in shape]
        sizes = [draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]
        return Box(tuple(offset), tuple(sizes))

    return shape, box(), box()


@quick
@given(two_boxes())
def test_intersection_is_the_common_elements(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = a.intersect(b)
    expected = set(elements(a, shape)) & set(elements(b, shape))
    assert (set(elements(common, shape)) if common else set()) == expected
    assert a.intersect(b) == b.intersect(a)


def test_slices_are_local_to_the_box_that_holds_them() -> None:
    inner, outer = Box((4, 2), (2, 1)), Box((3, 0), (4, 4))
    assert inner.slices() == (slice(4, 6), slice(2, 3))
    assert inner.slices(within=outer) == (slice(1, 3), slice(2, 3))
    with pytest.raises(LayoutError, match="expected a box inside"):
        outer.slices(within=inner)


def test_box_refuses_wrong_numbers() -> None:
    with pytest.raises(LayoutError, match="same length"):
        Box((0,), (1, 2))
    with pytest.raises(LayoutError, match="no negative"):
        Box((-1,), (1,))
    with pytest.raises(LayoutError, match="different tensors"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


@given(st.integers(0, 40), st.integers(1, 12))
@quick
def test_chunks_follow_the_rule_of_torch(size: int, parts: int) -> None:
    rows = -(-size // parts)
    starts = range(0, size, max(rows, 1))
    expected = [list(range(start, min(start + rows, size))) for start in starts]
    expected += [[]] * (parts - len(expected))
    found = [chunk(size, parts, index) for index in range(parts)]
    assert [list(range(start, start + length)) for start, length in found] == expected


def test_short_and_empty_last_chunks() -> None:
    assert [chunk(5, 4, index) for index in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


@quick
@given(
    st.lists(awkward, max_size=5),
    st.integers(1, 40),
    st.sampled_from([1, 4, 16]),
)
def test_pieces_of_all_parts_cover_every_element_once(
    all_shapes: list[Shape], parts: int, tensor_alignment: int
) -> None:
    layout = FlatLayout.pack(
        [f"p{i}" for i in range(len(all_shapes))],
        all_shapes,
        "float32",
        parts,
        tensor_alignment=tensor_alignment,
    )
    covered: list[tuple[int, int]] = []
    for part in range(parts):
        begin, end = layout.shard_range(part)
        for piece in layout.owned(part):
            first, _ = layout.range(piece.index)
            assert piece.numel > 0
            assert first + piece.start == begin + piece.offset
            assert piece.offset + piece.numel <= end - begin
            inside = [
                e for box in layout.boxes(piece) for e in elements(box, all_shapes[piece.index])
            ]
            assert inside == list(range(piece.start, piece.stop))
            covered += [(piece.index, element) for element in inside]
    whole = [(i, e) for i, shape in enumerate(all_shapes) for e in range(math.prod(shape))]
    assert covered == whole
    assert layout.numel == len(whole) <= layout.extent <= layout.padded_size
    assert all(offset % tensor_alignment == 0 for offset in layout.offsets)
    assert layout.padded_size - layout.extent < parts


def test_flat_layout_as_drawn() -> None:
    layout = FlatLayout.pack(["a", "b"], [(3, 2), (5,)], "float32", 4)
    assert (layout.numel, layout.padded_size, layout.shard_size) == (11, 12, 3)
    assert [(p.index, p.start, p.stop, p.offset) for p in layout.owned(1)] == [(0, 3, 6, 0)]
    assert [(p.index, p.start, p.stop, p.offset) for p in layout.owned(3)] == [(1, 3, 5, 0)]
    assert layout.boxes(layout.owned(1)[0]) == [Box((1, 1), (1, 1)), Box((2, 0), (1, 2))]


def test_more_parts_than_elements() -> None:
    layout = FlatLayout.pack(["a"], [(3,)], "float32", 7)
    assert [len(layout.owned(part)) for part in range(7)] == [1, 1, 1, 0, 0, 0, 0]
    empty = FlatLayout.pack([], [], "float32", 3)
    assert (empty.padded_size, empty.owned(2)) == (0, ())


def test_a_thousand_parts_of_a_thousand_tensors() -> None:
    names = [f"layers.{i}.weight" for i in range(1000)]
    layout = FlatLayout.pack(names, [(1009, 127)] * 1000, "bfloat16", 1024)
    assert sum(piece.numel for part in range(1024) for piece in layout.owned(part)) == layout.numel


def test_wrong_packing() -> None:
    with pytest.raises(LayoutError, match="one shape for each name, found 1 names and 0 shapes"):
        FlatLayout.pack(["a"], [], "float32", 1)
    with pytest.raises(LayoutError, match="each tensor once, found a more than once"):
        FlatLayout.pack(["a", "a"], [(1,), (1,)], "float32", 1)
    with pytest.raises(LayoutError, match="at least 1 part"):
        FlatLayout.pack(["a"], [(1,)], "float32", 0)
    with pytest.raises(LayoutError, match="part from 0 to 1, found 2"):
        FlatLayout.pack(["a"], [(1,)], "float32", 2).owned(2)


def test_bytes_of_dtypes() -> None:
    assert [dtype_bytes(name) for name in ("bool", "bfloat16", "float32", "int64")] == [1, 2, 4, 8]
    with pytest.raises(LayoutError, match="unknown dtype 'float31'"):
        dtype_bytes("float31")


# --------------------------------------------------------------------------------------- chunked


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5), st.integers(0, 1)), min_size=1),
    st.sampled_from([1, 2, 3, 8, 1024]),
)
@settings(max_examples=30, deadline=None)
def test_chunks_hold_every_element_once(cases: list[tuple[int, int, int]], parts: int) -> None:
    shapes = [(rows, columns) for rows, columns, _ in cases]
    names = [str(number) for number in range(len(cases))]
    dims = [dim for _, _, dim in cases]
    layout = FlatLayout.chunked(names, shapes, "float32", parts, dims=dims)
    assert layout.padded_size == parts * (layout.offsets[-1] + layout.sizes[-1]) >= layout.numel
    assert not any(offset % ALIGNMENT for offset in layout.offsets)
    ends = [start + size for start, size in zip(layout.offsets, layout.sizes, strict=True)]
    gaps = [start - end for end, start in zip(ends, layout.offsets[1:], strict=False)]
    assert all(0 <= gap < ALIGNMENT for gap in gaps)
    held: list[list[int]] = [[] for _ in cases]
    for part in range(parts):
        for index in range(len(cases)):
            box = layout.box(index, part)
            held[index] += elements(box, shapes[index])
            assert box.numel <= layout.sizes[index]
    for shape, found in zip(shapes, held, strict=True):
        assert sorted(found) == list(range(math.prod(shape)))


def test_chunks_as_drawn() -> None:
    layout = FlatLayout.chunked(["a", "b"], [(3, 2), (4,)], "float32", 2)
    assert (layout.offsets, layout.shard_size, layout.sizes) == ((0, 16), 18, (4, 2))
    assert [layout.box(index, 1) for index in (0, 1)] == [Box((2, 0), (1, 2)), Box((2,), (2,))]
    assert list(layout.cuts(1)) == [
        Cut(0, 0, (1, 2), (3, 2), 0, 2),
        Cut(1, 16, (2,), (4,), 0, 2),
    ]
    assert [cut.slices for cut in layout.cuts(1)] == [(slice(2, 3),), (slice(2, 4),)]
    assert layout.padding == pytest.approx(0.2)


def test_chunks_refuse_dims_and_parts_that_are_not_there() -> None:
    with pytest.raises(LayoutError, match=r"'a' of shape \(3, 2\) has no dim 2"):
        FlatLayout.chunked(["a"], [(3, 2)], "float32", 2, dims=[2])
    with pytest.raises(LayoutError, match="expected one dim for each tensor"):
        FlatLayout.chunked(["a"], [(3, 2)], "float32", 2, dims=[])
    with pytest.raises(LayoutError, match="expected a part from 0 to 1, found 2"):
        FlatLayout.chunked(["a"], [(3, 2)], "float32", 2).box(0, 2)
