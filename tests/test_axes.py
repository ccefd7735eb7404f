"""Ranks and coordinates of named axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from support.internals.axes import DATA_AXES, KNOWN_AXES, SUM_AXES, Axes

many_axes = st.dictionaries(
    st.sampled_from(KNOWN_AXES), st.integers(min_value=1, max_value=5), max_size=4
).map(Axes.of)
quick = settings(max_examples=60, deadline=None)


def test_one_process_has_no_axes() -> None:
    axes = Axes()
    assert axes.world_size == 1
    assert axes.coordinate(0) == {}
    assert axes.rank() == 0
    assert axes.size("shard") == 1
    assert axes.groups("shard") == ((0,),)
    assert str(axes) == "of one process"


def test_first_axis_varies_slowest() -> None:
    axes = Axes.of({"replicate": 2, "shard": 3})
    drawn = [tuple(axes.coordinate(rank).values()) for rank in range(6)]
    assert drawn == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert axes.groups("shard") == ((0, 1, 2), (3, 4, 5))
    assert axes.groups("replicate") == ((0, 3), (1, 4), (2, 5))
    assert axes.groups(DATA_AXES) == ((0, 1, 2, 3, 4, 5),)
    assert axes.groups("tensor") == tuple((rank,) for rank in range(6))
    assert axes.peers(4, "replicate") == (1, 4)
    assert axes.rank(replicate=1, shard=2) == axes.rank({"shard": 2, "replicate": 1}) == 5
    assert axes.rank(shard=2, tensor=0) == 2
    assert str(axes) == "replicate = 2 x shard = 3"
    assert axes.mapping() == {"replicate": 2, "shard": 3}


@quick
@given(many_axes)
def test_rank_and_coordinate_are_inverse(axes: Axes) -> None:
    assert axes.world_size == math.prod(axes.sizes)
    coordinates = [axes.coordinate(rank) for rank in range(axes.world_size)]
    assert [axes.rank(position) for position in coordinates] == list(range(axes.world_size))
    assert [tuple(c.values()) for c in coordinates] == sorted(
        tuple(c.values()) for c in coordinates
    )


@quick
@given(many_axes, st.sets(st.sampled_from(KNOWN_AXES), max_size=3))
def test_groups_partition_the_ranks(axes: Axes, names: set[str]) -> None:
    groups = axes.groups(names)
    assert sorted(rank for group in groups for rank in group) == list(range(axes.world_size))
    assert {len(group) for group in groups} == {math.prod(axes.size(name) for name in names)}
    for group in groups:
        assert list(group) == sorted(group)
        fixed = [{k: v for k, v in axes.coordinate(r).items() if k not in names} for r in group]
        assert all(here == fixed[0] for here in fixed)
        assert all(axes.peers(rank, names) == group for rank in group)


def test_four_thousand_ranks_have_peers_without_listing_all_groups() -> None:
    axes = Axes.of({"pipeline": 8, "replicate": 64, "tensor": 8})
    assert axes.peers(4095, "tensor") == tuple(range(4088, 4096))


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("a",), (), "one size for each axis"),
        (("a", "a"), (1, 2), "each axis once"),
        (("a",), (0,), "size of at least 1 for axis 'a', found 0"),
        (("",), (1,), "a name for each axis"),
    ],
)
def test_wrong_axes(names: tuple[str, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Axes(names, sizes)


def test_ranks_and_coordinates_outside() -> None:
    axes = Axes.of({"shard": 2})
    with pytest.raises(LayoutError, match="rank from 0 to 1 for axes shard = 2, found 2"):
        axes.coordinate(2)
    with pytest.raises(LayoutError, match="coordinate from 0 to 1 on axis 'shard'"):
        axes.rank(shard=2)
    with pytest.raises(LayoutError, match="coordinate from 0 to 0 on axis 'tensor'"):
        axes.rank(tensor=1)


def test_axes_of_data_are_known() -> None:
    assert set(DATA_AXES) < set(SUM_AXES) < set(KNOWN_AXES)


def test_ranks_of_one_sequence_read_one_share_and_sum_their_gradients() -> None:
    axes = Axes.of({"shard": 2, "context": 2, "expert": 2, "tensor": 2})
    assert axes.groups(DATA_AXES) == (
        *((0, 2, 8, 10), (1, 3, 9, 11)),
        *((4, 6, 12, 14), (5, 7, 13, 15)),
    )
    assert axes.groups(SUM_AXES) == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
