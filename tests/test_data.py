"""One stream of samples, whatever the ranks, the workers, the batches and the interruptions."""

from __future__ import annotations

import functools
import json
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm import communicator
from meshwright.data import DataLoader, PackedDataLoader
from meshwright.errors import PlanError
from meshwright.testing import Ranks

SEED = 11


@dataclass
class Drawing:
    """Samples that are their number, and what three generators draw for it."""

    size: int
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        self.reads.append(index)
        return index, torch.rand(()).item(), random.random(), float(numpy.random.rand())


@dataclass(frozen=True)
class Documents:
    """Documents whose tokens say which they are, and which token of it."""

    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(self.lengths[index]) + 1000 * index


def joined(batch: Any) -> list[Any]:
    """The samples of a batch of one rank."""
    if isinstance(batch, list):
        return list(zip(*(column.tolist() for column in batch), strict=True))
    return batch["input_ids"].flatten().tolist()


@dataclass(frozen=True)
class Attempt:
    """A part of a run: so many steps, on so many ranks, of such batches."""

    ranks: int
    share: int
    steps: int
    workers: int = 0
    row_length: int = 0


attempts = st.lists(
    st.builds(
        Attempt,
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(0, 3),
        st.just(0),
        st.integers(1, 9),
    ),
    min_size=25,
    max_size=25,
)


# A failure is shown as it was found: to look for a smaller one takes minutes.
cases = settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))


def stream(make: Callable[..., Any], parts: Sequence[Attempt]) -> list[Any]:
    """All samples of a run that is interrupted after each of ``parts``, through JSON."""
    found: list[Any] = []
    state: dict[str, int] | None = None
    for part in parts:
        loaders = [make(part, data_rank=rank, data_size=part.ranks) for rank in range(part.ranks)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for _ in range(part.steps):
            for loader in loaders:
                found += joined(next(iter(loader)))
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
    return found


LENGTHS = [3, 0, 7, 1, 12, 5, 0, 2, 4, 9, 1]


def of_samples(part: Attempt, **share: int) -> DataLoader[Any]:
    size = part.ranks * part.share
    return DataLoader(Drawing(29), size, seed=SEED, num_workers=part.workers, **share)


def of_tokens(part: Attempt, **share: int) -> PackedDataLoader:
    return PackedDataLoader(
        Documents(LENGTHS),
        part.row_length,
        part.ranks * part.share,
        lengths=LENGTHS,
        seed=SEED,
        num_workers=part.workers,
        **share,
    )


@functools.cache
def uninterrupted_samples() -> list[Any]:
    """More than the samples that the longest run takes, in one process and batches of 29."""
    return stream(of_samples, [Attempt(1, 29, 35)])


@functools.cache
def uninterrupted_tokens() -> list[int]:
    """The same of tokens, in rows of 1,000."""
    return stream(of_tokens, [Attempt(1, 1, 10, row_length=1000)])


@cases
@given(attempts)
def test_a_thousand_interruptions_leave_one_stream_of_samples(parts: list[Attempt]) -> None:
    found = stream(of_samples, parts)
    assert found == uninterrupted_samples()[: len(found)]


@settings(cases, max_examples=10)
@given(attempts)
def test_changes_of_rows_leave_one_stream_of_tokens(parts: list[Attempt]) -> None:
    found = stream(of_tokens, parts)
    assert found == uninterrupted_tokens()[: len(found)]


@pytest.mark.slow
@cases
@given(attempts)
def test_a_thousand_interruptions_leave_one_stream_of_tokens(parts: list[Attempt]) -> None:
    found = stream(of_tokens, parts)
    assert found == uninterrupted_tokens()[: len(found)]


def test_each_sample_and_token_comes_once_an_epoch() -> None:
    samples = [index for index, *_ in uninterrupted_samples()]
    assert [sorted(samples[i : i + 29]) for i in (0, 29, 58)] == [list(range(29))] * 3
    whole = sorted(token for each in range(11) for token in Documents(LENGTHS)[each].tolist())
    tokens = uninterrupted_tokens()
    assert [sorted(tokens[i : i + 44]) for i in (0, 44, 88)] == [whole] * 3
    assert samples[:29] != samples[29:58]


def test_workers_do_not_show() -> None:
    parts = [Attempt(2, 2, 3, workers=2), Attempt(1, 3, 4, workers=1), Attempt(1, 5, 2)]
    found = stream(of_samples, parts)
    assert found == uninterrupted_samples()[: len(found)]
    found = stream(of_tokens, [Attempt(1, 2, 3, workers=2, row_length=6)])
    assert found == uninterrupted_tokens()[: len(found)]


def test_a_loop_is_a_pass_and_a_batch_may_span_two() -> None:
    loader: DataLoader[Any] = DataLoader(Drawing(10), 4, seed=SEED)
    lengths = [len(loader)]
    passes: list[list[int]] = []
    for _ in range(4):
        passes.append([int(index) for batch in loader for index in batch[0]])
        lengths.append(len(loader))
    assert [len(each) // 4 for each in passes] == lengths[:4] == [3, 2, 3, 2]
    indices = [index for each in passes for index in each]
    assert [sorted(indices[i : i + 10]) for i in (0, 10, 20, 30)] == [list(range(10))] * 4
    assert loader.state_dict() == {"seed": SEED, "epoch": 4, "position": 0, "size": 10}


def test_a_loop_that_was_left_is_gone_on_with() -> None:
    loader: DataLoader[Any] = DataLoader(Drawing(12), 3, seed=SEED)
    whole = [joined(batch) for batch in DataLoader(Drawing(12), 3, seed=SEED)]
    first = joined(next(iter(loader)))
    assert [first, *map(joined, loader)] == whole


def test_the_generators_of_the_process_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    loader: DataLoader[Any] = DataLoader(Drawing(12), 3)
    drawn = [draw()]
    for _, _ in zip(range(2), loader, strict=False):
        drawn.append(draw())
    assert drawn == expected


def test_collating_draws_what_the_sample_before_it_left() -> None:
    def collate(samples: list[object]) -> float:
        return torch.rand(()).item()

    batches = [
        list(DataLoader(Drawing(12), 3, num_workers=workers, collate_fn=collate))
        for workers in (0, 1)
    ]
    assert batches[0] == batches[1]
    assert len(set(batches[0])) == 4


def counted(loader: DataLoader[Any], state: dict[str, int]) -> tuple[int, int]:
    """Calls of Python's functions, and bytes held at most, to go on from ``state`` by a batch."""
    calls = 0

    def count(frame: object, event: str, value: object) -> None:
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        loader.load_state_dict(state)
        next(iter(loader))
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return calls, peak


class Lengths:
    """A billion lengths, which count who asks."""

    asked = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return 1 + index % 7


class Billion(Lengths):
    """A billion documents."""

    def __getitem__(self, index: int) -> list[int]:
        self.asked += 1
        return [index] * (1 + index % 7)


def test_a_billion_samples_cost_what_a_thousand_do() -> None:
    def make(size: int) -> DataLoader[Any]:
        return DataLoader(Drawing(size), 8, data_rank=1, data_size=2)

    found: dict[int, tuple[int, int]] = {}
    for size in (1_000, 10**9):
        loader = make(size)
        next(iter(loader))  # what is loaded once
        state = {**loader.state_dict(), "epoch": 3, "position": size - 100}
        found[size] = counted(loader, state)
        assert len(loader.dataset.reads) == 8
        assert len(json.dumps(loader.state_dict())) < 100
    # An index that the network puts outside of the data walks on: a few calls more or less.
    assert found[10**9][0] < 1.2 * found[1_000][0]
    assert found[10**9][1] < 1_000_000


def test_a_billion_documents_are_asked_for_those_of_the_batch() -> None:
    lengths, documents = Lengths(), Billion()
    loader = PackedDataLoader(documents, 16, 8, lengths=lengths, data_rank=1, data_size=2)
    state = {**loader.state_dict(), "epoch": 3, "position": 10**9 - 5, "offset": 0}
    _, peak = counted(loader, state)
    assert lengths.asked <= 16 * 8
    assert documents.asked <= 16 * 4
    assert peak < 1_000_000
    assert len(json.dumps(loader.state_dict())) < 100


def test_rows_say_where_documents_begin() -> None:
    loader = PackedDataLoader(Documents([3, 5, 4]), 4, 3, seed=SEED)
    (batch,) = loader
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (3, 4)
    )
    for tokens, places, labels in zip(*(batch[name].tolist() for name in batch), strict=True):
        for column, (token, place, label) in enumerate(zip(tokens, places, labels, strict=True)):
            goes_on = column > 0 and token == tokens[column - 1] + 1
            assert place == (places[column - 1] + 1 if goes_on else 0)
            assert label == (token if goes_on else -100)
    assert Counter(batch["input_ids"].flatten().tolist()).total() == 12


def test_labels_are_shifted_before_rows_are_split() -> None:
    given: Any = {"lengths": [3, 5, 4], "seed": SEED}
    documents = Documents(given["lengths"])
    (plain,) = PackedDataLoader(documents, 4, 3, **given)
    (batch,) = PackedDataLoader(documents, 4, 3, shifted=True, **given)
    assert [*batch] == ["input_ids", "position_ids", "shift_labels"]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(batch[name], plain[name])
    assert torch.equal(batch["shift_labels"][:, :-1], plain["labels"][:, 1:])
    assert batch["shift_labels"][:, -1].tolist() == [-100] * 3


def test_documents_may_be_arrays_or_mappings() -> None:
    arrays = [numpy.array([1, 2, 3], dtype=numpy.uint16), numpy.array([4], dtype=numpy.uint16)]
    mappings = [{"input_ids": array.tolist()} for array in arrays]
    found = [next(iter(PackedDataLoader(each, 4, 1)))["input_ids"] for each in (arrays, mappings)]
    assert found[0].dtype == torch.int64
    assert torch.equal(found[0], found[1])
    assert sorted(found[0].flatten().tolist()) == [1, 2, 3, 4]


def test_ranks_read_what_one_process_does(ranks: Ranks) -> None:
    def body() -> tuple[list[Any], list[Any]]:
        world = communicator()
        with pytest.raises(ValueError, match="data_size on each of 2 ranks, found None and None"):
            DataLoader(Drawing(12), 4)
        loader: DataLoader[Any] = DataLoader(
            Drawing(12), 4, seed=SEED, data_rank=world.rank, data_size=world.size, num_workers=1
        )
        shares = [joined(batch) for batch in loader]
        return world.gather_values(shares, label="shares")[::-1], shares

    both, shares = ranks(2, body)[1]
    alone = [joined(batch) for batch in DataLoader(Drawing(12), 4, seed=SEED)]
    assert both[0] == [list(map(list, share)) for share in shares]
    found = [[tuple(each) for each in a + b] for b, a in zip(*both, strict=True)]
    assert found == alone


def test_a_sample_that_raises_is_read_again() -> None:
    class Once(Drawing):
        def __getitem__(self, index: int) -> Any:
            if len(self.reads) == 5:
                self.reads.append(-1)
                raise OSError("the disk is away")
            return super().__getitem__(index)

    loader: DataLoader[Any] = DataLoader(Once(12), 3, seed=SEED)
    found = [joined(next(iter(loader)))]
    with pytest.raises(OSError, match="the disk is away"):
        next(iter(loader))
    found += map(joined, loader)
    assert found == [joined(batch) for batch in DataLoader(Drawing(12), 3, seed=SEED)]


def test_states_that_do_not_fit_are_refused() -> None:
    loader: DataLoader[Any] = DataLoader(Drawing(12), 3)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="of 13 samples, this one has 12"):
        loader.load_state_dict({**state, "size": 13})
    with pytest.raises(ValueError, match="found \\['epoch', 'offset'"):
        loader.load_state_dict(PackedDataLoader(Documents([3]), 2, 2).state_dict())
    with pytest.raises(ValueError, match="position of at least 0 samples, found -1"):
        loader.load_state_dict({**state, "position": -1})
    assert loader.state_dict() == state


def test_numbers_of_numpy_are_saved_as_those_of_python() -> None:
    seed, two = numpy.int64(5), numpy.int32(2)
    loader: DataLoader[Any] = DataLoader(Drawing(4), two, seed=seed)
    rows = PackedDataLoader(Documents([3]), two, two, lengths=numpy.array([3]), seed=seed)
    for each in (loader, rows):
        next(iter(each))
        assert {type(value) for value in each.state_dict().values()} == {int}


def test_wrong_arguments() -> None:
    with pytest.raises(PlanError, match="fewer than a batch: 2 samples"):
        DataLoader(Drawing(2), 3)
    with pytest.raises(PlanError, match="does not divide among 2 data ranks"):
        PackedDataLoader(Documents([3]), 2, 3, data_rank=0, data_size=2)
    with pytest.raises(ValueError, match="data_size on each of 1 ranks, found 1 and None"):
        DataLoader(Drawing(2), 1, data_rank=1)
    with pytest.raises(ValueError, match="none of the 2 documents has a token"):
        next(iter(PackedDataLoader(Documents([0, 0]), 2, 1)))
    for length in (2, 4):  # fewer: tokens would be lost without a word
        with pytest.raises(ValueError, match=f"document 0: expected {length} tokens.*found 3"):
            next(iter(PackedDataLoader(Documents([3]), 2, 1, lengths=[length])))
    for documents in ([[1.5, 2.5]], [torch.ones(2)], ["12"], [numpy.ones(2)]):
        with pytest.raises(TypeError, match="document 0: expected the numbers of tokens, found"):
            next(iter(PackedDataLoader(documents, 2, 1)))
    with pytest.raises(ValueError, match=r"expected one row of tokens, found the shape \(2, 3\)"):
        next(iter(PackedDataLoader([torch.ones(2, 3, dtype=torch.int64)], 2, 1)))
    with pytest.raises(TypeError, match="expected a map-style data set.*found a generator"):
        DataLoader((n for n in range(3)), 1)  # pyrefly: ignore
    with pytest.raises(TypeError, match="expected an integer as seed, found None"):
        DataLoader(Drawing(2), 1, seed=None)  # pyrefly: ignore
    loader = PackedDataLoader(Documents([3]), 4, 1)
    loader.load_state_dict({**loader.state_dict(), "offset": 9})
    with pytest.raises(ValueError, match="document 0 has 3 tokens, and 9 of them were taken"):
        next(iter(loader))
    with pytest.raises(TypeError, match="cannot tell the number of its batches"):
        len(loader)
