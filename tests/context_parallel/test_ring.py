"""Attention by parts of the keys equals one process, and sends what is seen and no more."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.testing import Ranks
from support.context_parallel.attention import (
    KINDS,
    METHODS,
    Case,
    Inputs,
    by_blocks_of,
    compare,
)
from support.internals.context_parallel import ContextSplit, MaskWords, ring_attention

ONE = ((29,),)
PACKED = ((13, 1, 9, 6),)
OTHERS = ((13, 1, 9, 6), (29,))
GROUPS = ((8, 1), (8, 2), (6, 3))


def ring(
    inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    return ring_attention(
        q,
        k,
        v,
        inputs.split,
        comm.communicator(),
        inputs.words,
        scale=0.3,
        sinks=sinks,
        label="attn",
    )


def body(cases: list[Case]) -> None:
    for case in cases:
        by_blocks_of(case.blocks)
        compare(case, ring)


QUICK = [
    Case(ONE, {}, method="zigzag"),
    Case(ONE, {}, method="contiguous", blocks=256),
    Case(ONE, {"causal": False}, (8, 2), dv=5),
    Case(PACKED, {}, (8, 1), dv=12),
    Case(PACKED, {}, method="zigzag", sinks=True),
    Case(OTHERS, {}, (6, 3), sinks=True),
    Case(OTHERS, {"causal": False}, method="contiguous"),
    Case(ONE, {"window": 5}, (8, 2), sinks=True),
    Case(OTHERS, {"window": 4, "causal": False}, method="zigzag"),
    Case(PACKED, {"chunk": 6}, rows=1),
    Case(ONE, {}, padded=(0, 11), sinks=True),
    Case(PACKED, {"causal": False}, padded=(-10, 29), method="contiguous"),
    Case(((97,),), {}, (4, 2), method="zigzag", blocks=8),
    Case(((97,),), {"window": 40}, method="contiguous", blocks=4),
    Case(((4,),), {}),
]


@pytest.mark.parametrize("count", [2, 4])
def test_ring_is_one_process(ranks: Ranks, count: int) -> None:
    ranks(count, body, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_grid(ranks: Ranks, count: int, kind: str) -> None:
    cases = [
        Case(documents, KINDS[kind], heads, 8, dv, sinks=sinks, padded=padded, method=method)
        for documents, heads, method in itertools.product((ONE, PACKED, OTHERS), GROUPS, METHODS)
        for dv, sinks, padded in ((8, False, ()), (5, True, (0, 7)), (11, True, (-8, 3)))
    ]
    ranks(count, body, cases, timeout=300)
