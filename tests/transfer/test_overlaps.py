"""What travels from whom to whom, computed from descriptions alone."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from meshwright.errors import TransferError
from support.internals.layout import Box, boxes
from support.internals.transfer import overlaps

Shape = tuple[int, ...]
BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}


def told(
    publishes: bool,
    tensors: dict[str, tuple[str, Shape, list[Box]]],
    ties: dict[str, str] | None = None,
    buffers: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a rank tells of its tensors: by name, dtype, shape and boxes."""
    rows = [
        (name, dtype, shape, [(box.offset, box.shape) for box in held], ())
        for name, (dtype, shape, held) in tensors.items()
    ]
    return {"publishes": publishes, "tensors": rows, "ties": ties or {}, "buffers": list(buffers)}


def full(*shape: int, dtype: str = "float32") -> tuple[str, Shape, list[Box]]:
    return dtype, shape, [Box.whole(shape)]


SHAPES: dict[str, Shape] = {"a": (7, 5), "b": (11,), "c": (), "d": (4, 3, 6), "e": (2, 0)}
DTYPES = {"a": "float32", "b": "bfloat16", "c": "int64", "d": "bfloat16", "e": "float32"}


def drawn_side(draw: random.Random, publishes: bool, first: int) -> dict[int, dict[str, Any]]:
    """Some ranks: whole copies, parts along a dim, ranges of elements; copied or not."""
    ranks, copies = draw.randint(1, 4), draw.randint(1, 2)
    sides: list[dict[str, Any]] = [{} for _ in range(ranks * copies)]
    for name, shape in SHAPES.items():
        kind = draw.choice(["whole", "range", "dim"] if shape else ["whole"])
        for number, side in enumerate(sides):
            part, held = number % ranks, [Box.whole(shape)]
            if kind == "range":
                numel = math.prod(shape)
                cut = [numel * n // ranks for n in (part, part + 1)]
                held = boxes(shape, *cut)
            elif kind == "dim":
                start, stop = (shape[0] * n // ranks for n in (part, part + 1))
                held = [Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))]
            side[name] = DTYPES[name], shape, [box for box in held if box.numel]
    return {first + n: told(publishes, side) for n, side in enumerate(sides)}


@pytest.mark.parametrize("seed", range(40))
def test_every_element_arrives_once_from_one_rank(seed: int) -> None:
    draw = random.Random(seed)
    publishers = drawn_side(draw, True, 0)
    receivers = drawn_side(draw, False, 10)
    found = overlaps({**receivers, **publishers})
    count = {
        (rank, name): torch.zeros(shape, dtype=torch.int64)
        for rank in receivers
        for name, shape in SHAPES.items()
    }
    for each in found:
        (name, source), (target_name, target) = each.source, each.target
        assert name == target_name
        assert each.box == each.box.intersect(source) == each.box.intersect(target)
        held = {row[0]: row[3] for row in publishers[each.sender]["tensors"]}
        assert (source.offset, source.shape) in held[name]
        count[each.receiver, name][each.box.slices()] += 1
    for rank, own in receivers.items():
        for name, _, _, held, _ in own["tensors"]:
            expected = torch.zeros(SHAPES[name], dtype=torch.int64)
            for offset, shape in held:
                expected[Box(offset, shape).slices()] = 1
            assert torch.equal(count[rank, name], expected), (rank, name)
    bounded(found)


def bounded(found: list[Any]) -> None:
    """Rounds grow on each rank, and carry at most the bytes of the largest tensor."""
    limit = max(math.prod(shape) * BYTES[DTYPES[name]] for name, shape in SHAPES.items())
    load: defaultdict[tuple[int, int], int] = defaultdict(int)
    at: defaultdict[int, int] = defaultdict(int)
    for each in found:
        for rank in (each.sender, each.receiver):
            load[rank, each.round] += each.size
            assert each.round >= at[rank]
            at[rank] = each.round
    assert max(load.values()) <= limit


def test_replicas_share_the_sending_evenly() -> None:
    tensors = {f"{n}": full(3 + n % 5, 8) for n in range(30)}
    owns = {rank: told(rank < 3, tensors) for rank in range(5)}
    load: defaultdict[int, int] = defaultdict(int)
    for each in overlaps(owns):
        load[each.sender] += each.size
    assert set(load) == {0, 1, 2}
    assert max(load.values()) - min(load.values()) <= 7 * 8 * 4


def test_a_buffer_comes_whole_from_the_first_rank() -> None:
    tensors = {f"{n}": full(4) for n in range(6)}
    names = ("1", "2", "5")
    owns = {rank: told(rank < 2, tensors, buffers=names) for rank in range(4)}
    senders: defaultdict[str, set[int]] = defaultdict(set)
    for each in overlaps(owns):
        senders[each.source[0]].add(each.sender)
    assert all(senders[name] == {0} for name in names)
    assert set().union(*senders.values()) == {0, 1}


def test_one_message_for_each_tensor_that_does_not_fit() -> None:
    there = {"same": full(2), "shape": full(2), "dtype": full(2), "only there": full(2)}
    there["gap"] = ("float32", (4,), [Box((0,), (2,))])
    here = {"same": full(2), "shape": full(3), "dtype": full(2, dtype="bfloat16")}
    here |= {"only here": full(2), "gap": full(4)}
    with pytest.raises(TransferError) as caught:
        overlaps({3: told(True, there), 5: told(False, here)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 7, lines
    for words in (
        "'shape' is float32 (2,) from rank 3 and float32 (3,) on rank 5",
        "'dtype' is float32 (2,) from rank 3 and bfloat16 (2,) on rank 5",
        "'only here' is one tensor on the receiver of rank 5 and none on the publishers",
        "'only there' is on the publisher of rank 3 and on no receiver",
        "'gap' is not on the publishers once: ",
    ):
        assert words in str(caught.value)


def test_a_tensor_tied_on_one_side() -> None:
    one = told(True, {"in": full(2)}, {"out": "in"})
    two = told(False, {"in": full(2), "out": full(2)})
    found = overlaps({0: one, 1: two})
    assert sorted(each.target[0] for each in found) == ["in", "out"]
    assert {each.source[0] for each in found} == {"in"}
    with pytest.raises(TransferError, match="'in' is one tensor on .* rank 1 and 'in' and 'out' "):
        overlaps(
            {0: {**two, "publishes": True}, 1: {**one, "publishes": False}},
        )


def test_ties_whose_first_names_differ() -> None:
    owns = {
        0: told(True, {"in": full(2)}, {"out": "in"}),
        1: told(False, {"out": full(2)}, {"in": "out"}),
    }
    (each,) = overlaps(owns)
    assert (each.source[0], each.target[0]) == ("in", "out")
