"""The order of samples: the same for any number of ranks, each sample once in an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from support.internals.sampling import PackedSampler, Permutation, Sampler

quick = settings(max_examples=60, deadline=None)


@quick
@given(st.integers(1, 700), st.integers(0, 2**70), st.integers(0, 5))
def test_a_permutation_has_every_index_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert len(order) == size
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_permutations_differ_by_seed_and_epoch() -> None:
    orders = {
        tuple(Permutation(50, seed, epoch)[i] for i in range(50))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@pytest.mark.parametrize("size", [3, 8, 13])
def test_every_sample_comes_equally_often_to_every_place(size: int) -> None:
    """Chi-square over all pairs of place and sample, 2000 permutations: far tails only."""
    epochs = 2000
    counts = Counter(
        (place, order[place])
        for epoch in range(epochs)
        for order in [Permutation(size, 7, epoch)]
        for place in range(size)
    )
    expected = epochs / size
    statistic = sum(
        (counts[place, sample] - expected) ** 2 / expected
        for place in range(size)
        for sample in range(size)
    )
    freedom = (size - 1) ** 2
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


def test_neighbors_do_not_stay_neighbors() -> None:
    order = Permutation(100_000, 1, 0)
    steps = [abs(order[i + 1] - order[i]) for i in range(2000)]
    assert sum(step < 1000 for step in steps) < 100
    assert len(set(steps)) > 1800


def test_places_outside_are_refused() -> None:
    order = Permutation(3, 0, 0)
    assert sorted(order) == [0, 1, 2]
    with pytest.raises(IndexError, match="place from 0 to 2, found 3"):
        order[3]


@st.composite
def samplings(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Data set size, batch size, number of ranks, seed."""
    data_size = draw(st.integers(1, 6))
    batch_size = data_size * draw(st.integers(1, 5))
    return draw(st.integers(batch_size, 90)), batch_size, data_size, draw(st.integers(0, 99))


@quick
@given(samplings(), st.integers(1, 12))
def test_shares_in_rank_order_are_the_batch_of_one_rank(
    sampling: tuple[int, int, int, int], steps: int
) -> None:
    dataset_size, batch_size, data_size, seed = sampling
    alone = Sampler(dataset_size, batch_size, seed)
    ranks = [Sampler(dataset_size, batch_size, seed, r, data_size) for r in range(data_size)]
    for _ in range(steps):
        shares = [rank.next_indices() for rank in ranks]
        assert [index for share in shares for index in share] == alone.next_indices()
        assert {len(share) for share in shares} == {batch_size // data_size}
    assert {rank.position for rank in ranks} == {alone.position} == {steps * batch_size}


@quick
@given(samplings())
def test_every_epoch_visits_every_sample_once(sampling: tuple[int, int, int, int]) -> None:
    dataset_size, batch_size, _, seed = sampling
    sampler = Sampler(dataset_size, batch_size, seed)
    stream = [index for _ in range(3 * dataset_size) for index in next(sampler)]
    epochs = [stream[i : i + dataset_size] for i in range(0, 3 * dataset_size, dataset_size)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(dataset_size))] * 3


@quick
@given(samplings(), st.integers(0, 10), st.integers(1, 4))
def test_resuming_goes_on_exactly_on_any_number_of_ranks(
    sampling: tuple[int, int, int, int], before: int, factor: int
) -> None:
    dataset_size, batch_size, data_size, seed = sampling
    whole = Sampler(dataset_size, batch_size, seed)
    for _ in range(before):
        whole.next_indices()
    state = whole.state_dict()
    assert state == {"position": before * batch_size, "seed": seed, "size": dataset_size}
    resumed = [
        Sampler(dataset_size, batch_size, seed, rank, data_size) for rank in range(data_size)
    ]
    for sampler in resumed:
        sampler.load_state_dict(state)
    for _ in range(factor):
        parts = [index for sampler in resumed for index in sampler.next_indices()]
        assert parts == whole.next_indices()
    from_position = Sampler(dataset_size, batch_size, seed, position=state["position"])
    assert from_position.epoch == state["position"] // dataset_size
    from_position.load_state_dict({"position": 0})  # as saved before
    assert next(from_position) == next(Sampler(dataset_size, batch_size, seed))


def test_the_order_is_part_of_the_format() -> None:
    """A checkpoint holds no list of samples, so the order must not change between versions."""
    assert Sampler(1000, 8, seed=0).next_indices() == FIRST_BATCH


FIRST_BATCH = [327, 461, 218, 448, 623, 490, 212, 544]


def test_data_fewer_than_a_batch_and_an_indivisible_batch_are_told_together() -> None:
    with pytest.raises(PlanError) as caught:
        Sampler(5, 8, 0, data_rank=0, data_size=3)
    assert caught.value.problems == (
        "the data are fewer than a batch: 5 samples for a batch_size of 8; give more data (of a "
        "text also a shorter context), or a smaller batch_size",
        "batch_size 8 does not divide among 3 data ranks; use 6 or 9",
    )
    with pytest.raises(PlanError, match=r"among 4 data ranks; use 4$"):
        Sampler(5, 2, 0, data_rank=0, data_size=4)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="data_rank below data_size"):
        Sampler(5, 2, 0, data_rank=2, data_size=2)
    with pytest.raises(ValueError, match="batch of at least 1"):
        Sampler(5, 0, 0)
    with pytest.raises(ValueError, match="position of at least 0 samples, found -1"):
        Sampler(5, 2, 0, position=-1)
    with pytest.raises(ValueError, match=r"keys \['position', 'seed', 'size'\], found \['epoch'\]"):
        Sampler(5, 2, 0).load_state_dict({"epoch": 1})


def _packed(size: int, seed: int) -> PackedSampler:
    return PackedSampler(lambda document: 3, size, 4, 2, seed)


@pytest.mark.parametrize("make", [lambda size, seed: Sampler(size, 2, seed), _packed])
def test_a_place_in_another_order_is_refused(
    make: Callable[[int, int], Sampler | PackedSampler],
) -> None:
    state = make(5, 1).state_dict()
    make(5, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of seed 1, size 5, and seed 2, size 6 is"):
        make(6, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of size 5, and size 6 is given"):
        make(6, 1).load_state_dict(state)
    place = {name: state[name] for name in state if name not in ("seed", "size")}
    make(6, 2).load_state_dict(place)  # as saved before
