"""Which marks go together: every gradient once, by index, whatever the order of the nodes."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from support.compiler.graphs import mark, traced
from support.internals.compiler import describe, marks_of, plan_marks

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def graph_of(
    rows: list[tuple[int, torch.dtype, str]], sizes: tuple[int, ...], seed: int
) -> fx.Graph:
    """Marks of gradients given as (elements, dtype, group), in a shuffled order."""
    order = list(enumerate(rows))
    random.Random(seed).shuffle(order)

    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            mark(x.new_zeros(numel, dtype=dtype), index, group=group, model=group, sizes=sizes)
            for index, (numel, dtype, group) in order
        ]

    return traced(backward, (1,))


ROWS = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(("0", "1"))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(ROWS, st.lists(st.integers(1, 2000), min_size=1, max_size=3), st.integers(0, 99))
def test_every_gradient_has_one_bucket_by_index(
    rows: list[tuple[int, torch.dtype, str]], sizes: list[int], seed: int
) -> None:
    buckets = plan_marks(marks_of(graph_of(rows, tuple(sizes), seed)))
    assert sorted(i for bucket in buckets for i in bucket.indices) == list(range(len(rows)))
    for bucket in buckets:
        assert list(bucket.indices) == sorted(bucket.indices, reverse=True)
        assert len({(rows[i][1], rows[i][2]) for i in bucket.indices}) == 1
    for kind in {row[1:] for row in rows}:
        own = [b for b in buckets if (rows[b.indices[0]][1:]) == kind]
        for number, bucket in enumerate(own):
            limit = sizes[min(number, len(sizes) - 1)]
            if number < len(own) - 1:
                assert bucket.bytes >= limit
            without_last = bucket.bytes - rows[bucket.indices[-1]][0] * kind[0].itemsize
            assert without_last < limit
    again = plan_marks(marks_of(graph_of(rows, tuple(sizes), seed + 1)))
    assert [b.indices for b in again] == [b.indices for b in buckets]
    assert describe(again) == describe(buckets)


def test_seed_002_has_three_buckets() -> None:
    layers = [(2000 * 2000, torch.float32, "0"), (2000, torch.float32, "0")] * 4
    buckets = plan_marks(marks_of(graph_of(layers, (2**20, 25 * 2**20), 0)))
    assert [b.indices for b in buckets] == [(7, 6), (5, 4, 3, 2), (1, 0)]


def test_devices_reduce_a_bucket_of_bytes_in_one_operation() -> None:
    """Large gradients travel with others, where hosts reduce each of them in place."""
    megabyte = 2**20

    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        sizes = (megabyte, 25 * megabyte)
        return [mark(x.new_zeros(megabyte), i, mode="concat", sizes=sizes) for i in range(8)]

    parts = [
        part for bucket in plan_marks(marks_of(traced(backward, (1,)))) for part in bucket.parts
    ]
    assert [[each.index for each in part] for part in parts] == [[7], [6, 5, 4, 3, 2, 1, 0]]


def test_a_module_that_is_called_twice_reduces_in_rounds() -> None:
    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        return [mark(x * number, index) for number in (1, 2) for index in (0, 1)]

    buckets = plan_marks(marks_of(traced(backward, (4,))))
    assert [b.indices for b in buckets] == [(1, 0), (1, 0)]
    assert not {m.node for m in buckets[0].marks} & {m.node for m in buckets[1].marks}
