"""How rows of documents are split: tokens, work, and rows that travel."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.internals.context_parallel import ContextSplit, RowSplit, document_lengths, work_of

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30).map(tuple)
METHODS = ("contiguous", "zigzag", "documents")


@given(LENGTHS, st.integers(1, 8), st.sampled_from(METHODS), st.floats(0, 2))
def test_each_position_has_one_rank_and_tokens_are_equal(
    lengths: tuple[int, ...], ranks: int, method: str, share: float
) -> None:
    if sum(lengths) < ranks:
        with pytest.raises(ValueError, match=f"a row has {sum(lengths)} tokens for {ranks} ranks"):
            RowSplit.of(lengths, ranks, method, share)
        return
    split = RowSplit.of(lengths, ranks, method, share)
    held = [[p for piece in part for p in range(*piece)] for part in split.parts]
    assert sorted(itertools.chain(*held)) == list(range(sum(lengths)))
    assert all(part == sorted(part) for part in held)
    counts = [len(part) for part in held]
    assert counts == [sum(lengths) // ranks + (r < sum(lengths) % ranks) for r in range(ranks)]


def packing(kind: str, total: int, draw: random.Random) -> tuple[int, ...]:
    drawn = {
        "lognormal": lambda: draw.lognormvariate(5.5, 1.3),
        "pareto": lambda: 64 * draw.paretovariate(1.1),
        "tiny": lambda: draw.randint(1, 8),
    }[kind]
    lengths: list[int] = []
    while total:
        lengths.append(max(1, min(int(drawn()), total)))
        total -= lengths[-1]
    return tuple(lengths)


def rows_away(split: RowSplit) -> int:
    """Count keys on other ranks that queries of a rank see."""
    found, begin = 0, 0
    for end in split.ends:
        for pieces in split.parts:
            own = [(max(a, begin), min(b, end)) for a, b in pieces if a < end and b > begin]
            if own:
                found += own[-1][1] - begin - sum(b - a for a, b in own)
        begin = end
    return found


@pytest.mark.parametrize("number", [33, pytest.param(334, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_packed_documents_balance(count: int, number: int) -> None:
    """Row 6 of the acceptance: 1,000 packings, of which each number of ranks has a third."""
    draw, ranks, sent, whole = random.Random(count), count, 0, 0
    for kind in itertools.islice(itertools.cycle(("lognormal", "pareto", "tiny")), number):
        split = RowSplit.of(packing(kind, draw.choice([4096, 8191, 8192]), draw), ranks)
        work = work_of(split)
        assert max(work) * ranks / sum(work) <= 1.03, split.ends
        counts = [sum(b - a for a, b in pieces) for pieces in split.parts]
        assert max(counts) - min(counts) <= 1
        sent, whole = sent + rows_away(split), whole + split.ends[-1] * (ranks - 1)
    assert sent <= 0.70 * whole, sent / whole


def test_zigzag_balances_one_long_document() -> None:
    work = work_of(RowSplit.of((4096,), 4))
    assert max(work) - min(work) <= 4096
    work = work_of(RowSplit.of((4095,), 4, "zigzag"))
    assert max(work) * 4 / sum(work) < 1.01
    work = work_of(RowSplit.of((4096,), 4, "contiguous"))
    assert max(work) * 4 / sum(work) > 1.7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_make_the_whole_again(method: str, dim: int) -> None:
    for documents in ([[21]], [[9, 7, 5], [1, 19, 1], [21]]):
        split = ContextSplit.of(documents, 4, method)
        whole = torch.randn(3, *([21, 2] if dim == 1 else [2, 21]))
        parts = [split.part(whole, rank, dim) for rank in range(4)]
        assert [p.shape[dim] for p in parts] == [6, 5, 5, 5]
        assert torch.equal(split.whole(parts, dim), whole)


def test_documents_begin_at_zero_and_where_positions_fall() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 3, 4, 9]])
    assert document_lengths(positions) == [[3, 2, 1], [3, 3]]
    split = ContextSplit.of([[3, 2, 1], [3, 3]], 2)
    assert split.documents().tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]
