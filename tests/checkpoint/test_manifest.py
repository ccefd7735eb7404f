"""The rule that pieces cover each tensor exactly once, against counting every element."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import Manifest, Piece, TensorRecord
from support.internals.checkpoint import canonical, covers, from_bytes, seal, to_bytes, unseal
from support.internals.layout import Box, boxes


def covers_by_counting(shape: tuple[int, ...], pieces: list[Box]) -> bool:
    counts: dict[tuple[int, ...], int] = {}
    for box in pieces:
        if box.numel == 0:
            return False
        ranges = [range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
        for index in itertools.product(*ranges):
            counts[index] = counts.get(index, 0) + 1
    every = set(itertools.product(*map(range, shape)))
    return counts.keys() == every and set(counts.values()) <= {1}


def says_covered(shape: tuple[int, ...], pieces: list[Box]) -> bool:
    try:
        covers(shape, pieces)
    except ValueError:
        return False
    return True


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that come from cutting it, often with one piece moved, lost or doubled."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    pieces = [Box((0,) * len(shape), shape)] if 0 not in shape else []
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        if not pieces:
            break
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for start, stop in ((0, at), (at, box.shape[dim])):
            if start < stop:
                offset, size = list(box.offset), list(box.shape)
                offset[dim] += start
                size[dim] = stop - start
                pieces.append(Box(tuple(offset), tuple(size)))
    if pieces and draw(st.booleans()):
        number = draw(st.integers(0, len(pieces) - 1))
        box = pieces.pop(number)
        change = draw(st.sampled_from(["lose", "double", "move", "swap"]))
        if change == "double":
            pieces += [box, box]
        if change == "move":
            moved = tuple(max(o + draw(st.integers(-2, 2)), 0) for o in box.offset)
            pieces.append(Box(moved, box.shape))
        if change == "swap":
            pieces.append(Box(box.offset[::-1], box.shape[::-1]))
    return shape, pieces


@settings(max_examples=400, deadline=None)
@given(tilings())
def test_the_rule_agrees_with_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, pieces = case
    assert says_covered(shape, pieces) == covers_by_counting(shape, pieces)


def test_equal_sums_do_not_hide_an_overlap() -> None:
    shape = (2, 3)
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((1, 0), (1, 2))]
    covers(shape, pinwheel)
    with pytest.raises(ValueError, match=r"\[0:1, 0:2\] and \[0:1, 1:3\] overlap"):
        covers(shape, [Box((0, 0), (1, 2)), Box((0, 1), (1, 2)), Box((1, 0), (1, 2))])


def test_the_work_grows_with_the_pieces_not_with_their_pairs() -> None:
    shape, ranks = (4096, 1024, 3), 2000
    numel = 4096 * 1024 * 3
    cuts = [numel * rank // ranks for rank in range(ranks + 1)]
    pieces = [box for a, b in itertools.pairwise(cuts) for box in boxes(shape, a, b)]
    assert covers(shape, pieces) == len(pieces) * 8


def manifest() -> Manifest:
    piece = Piece(file="rank_00000.safetensors", key="t", box=Box((0,), (4,)), checksum=7)
    record = TensorRecord(dtype="int16", shape=(4,), pieces=(piece,))
    empty = TensorRecord(dtype="bool", shape=(0, 3), pieces=())
    return Manifest(step=3, tensors={"t": record, "none": empty}, metadata={"a": [1]})


def test_a_manifest_comes_back() -> None:
    back = from_bytes(to_bytes(manifest()))
    assert back == manifest()
    assert back.owner("rank_00000.safetensors", "t") == "t"
    with pytest.raises(KeyError):
        back.owner("rank_00001.safetensors", "t")


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        (b'"shape":[4]', b'"shape":[4.0]'),
        (b'"shape":[4]', b'"shape":[ 4]'),
        (b'"shape":[4]', b'"shape":[04]'),
        (b'"shape":[4],"pieces"', b'"shape":[true],"pieces"'),
        (b'"shape":[4],"pieces"', b'"shape":"4","pieces"'),
        (b'"offset":[0]', b'"offset":[-0]'),
        (b'"offset":[0]', b'"offset":[false]'),
        (b'"offset":[0]', b'"offset":{}'),
        (b'"step":3', b'"step":3.0'),
        (b'"step":3', b'"step":"3"'),
        (b'"step":3', b'"step":3,"step":3'),
        (b'"version":2', b'"version":true'),
        (b'"version":2', b'"version":[2]'),
        (b'"dtype":"int16"', b'"dtype":"i\\u006et16"'),
        (b'"dtype":"int16","shape":[4]', b'"shape":[4],"dtype":"int16"'),
        (b'"dtype":"int16",', b'"dtype":"int16","more":1,'),
        (b'"dtype":"int16",', b""),
        (b'"key":"t"', b'"key":["t"]'),
        (b"0000000000000007", b"0000000000000_07"),
        (b"0000000000000007", b"              +7"),
        (b"0000000000000007", b"000000000000000A"),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":[1], "b":2}'),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":[1e0]}'),
        (b'"metadata":{"a":[1]}', b'"metadata":{"a":[NaN]}'),
        (b'"metadata":{"a":[1]}', b'"metadata":[1]'),
        (b'"files":{', b'"files":{"rank_00001.safetensors":{},'),
    ],
)
def test_every_other_text_of_a_manifest_is_refused(written: bytes, changed: bytes) -> None:
    text = canonical(unseal(to_bytes(manifest())))
    assert from_bytes(seal(text)) == manifest()
    assert written in text
    with pytest.raises(ValueError, match=r"."):
        from_bytes(seal(text.replace(written, changed, 1)))


def test_the_first_difference_of_a_manifest_is_shown() -> None:
    text = canonical(unseal(to_bytes(manifest())))
    changed = seal(text.replace(b'"a":[1]', b'"a": [1]'))
    with pytest.raises(
        ValueError, match=r"manifest: expected b'\[1\].* at byte \d+, found b' \[1\]"
    ):
        from_bytes(changed)


def test_equal_forms_are_checked_once_and_others_each() -> None:
    def record(number: int, *stored: Box) -> TensorRecord:
        file = "rank_00000.safetensors"
        pieces = [Piece(file, f"{number}/{n}", box, 7) for n, box in enumerate(stored)]
        return TensorRecord("int16", (4,), tuple(pieces))

    sound = {str(n): record(n, Box((0,), (2,)), Box((2,), (2,))) for n in range(3)}
    Manifest(step=0, tensors=sound, metadata={})
    with pytest.raises(ValueError, match="tensor 'x': the pieces .* overlap"):
        Manifest(
            step=0,
            tensors={**sound, "x": record(4, Box((0,), (2,)), Box((1,), (2,)))},
            metadata={},
        )


def test_two_tensors_under_one_key_are_refused() -> None:
    record = manifest().tensors["t"]
    with pytest.raises(ValueError, match="two tensors under the key 't'"):
        Manifest(step=0, tensors={"a": record, "b": record}, metadata={})


def test_names_that_cannot_be_written_are_refused() -> None:
    record = TensorRecord(dtype="bool", shape=(0,), pieces=())
    with pytest.raises(ValueError, match="not valid Unicode"):
        Manifest(step=0, tensors={"\ud800": record}, metadata={})
    with pytest.raises(ValueError, match="a name of 5000 characters"):
        Manifest(step=0, tensors={"n" * 5000: record}, metadata={})
    with pytest.raises(ValueError, match="step -1 is not from 0"):
        Manifest(step=-1, tensors={}, metadata={})
