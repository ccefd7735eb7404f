"""Attention by heads equals one process, in two messages of the necessary bytes."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.testing import Ranks, RanksFailed
from support.context_parallel.attention import CLOSE, KINDS, METHODS, Case, Inputs, compare
from support.internals.context_parallel import ContextSplit, attention_by_heads, ring_attention
from support.internals.timeline import Collective

ONE = ((29,),)
OTHERS = ((13, 1, 9, 6), (29,))
GROUPS = ((8, 1), (8, 2), (8, 4), (4, 4))


def by_heads(
    inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: range) -> torch.Tensor:
        return inputs.attend(q, k, v, None if sinks is None else sinks[heads.start : heads.stop])

    return attention_by_heads(q, k, v, inputs.split, comm.communicator(), attend, label="attn")


def body(cases: list[Case]) -> None:
    for case in cases:
        compare(case, by_heads)


QUICK = [
    Case(ONE, {}, method="contiguous", rows=1),
    Case(ONE, {}, (8, 1), dv=5, method="zigzag"),
    Case(OTHERS, {}, (8, 2), sinks=True),
    Case(OTHERS, {"window": 5}, (8, 4), dv=11, method="zigzag", padded=(0, 7)),
    Case(OTHERS, {"causal": False, "chunk": 6}, (4, 1), sinks=True, method="contiguous"),
    Case(((4,),), {}, (4, 4)),
]


@pytest.mark.parametrize("count", [2, 4])
def test_heads_are_one_process(ranks: Ranks, count: int) -> None:
    ranks(count, body, QUICK)


def body_ring() -> None:
    world = comm.communicator()
    for case in QUICK:
        inputs = Inputs(case)
        own = [inputs.split.part(x, world.rank, 2) for x in inputs.given]
        words = {"scale": 0.3, "sinks": inputs.sinks, "label": "attn"}
        found = ring_attention(*own, inputs.split, world, inputs.words, **words)
        torch.testing.assert_close(found, by_heads(inputs, *own, inputs.sinks), **CLOSE)


def test_heads_are_the_ring(ranks: Ranks) -> None:
    ranks(4, body_ring)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_grid(ranks: Ranks, count: int, kind: str) -> None:
    cases = [
        Case(documents, KINDS[kind], heads, 8, dv, sinks=sinks, padded=padded, method=method)
        for documents, heads, method in itertools.product((ONE, OTHERS), GROUPS, METHODS)
        for dv, sinks, padded in ((8, False, ()), (5, True, (0, 7)))
    ]
    ranks(count, body, cases, timeout=300)


def body_bytes() -> None:
    """One message there and one back; backwards the same. Spec: (C-1)/C n w (2 H d + 2 g' d)."""
    world = comm.communicator()
    cells = itertools.product(
        ((1, 8), (4, 8), (8, 8), (8, 16)), (torch.float64, torch.bfloat16), METHODS, (24, 21)
    )
    for (keys, heads), dtype, method, length in cells:
        split = ContextSplit.of([[length]], world.size, method)
        n = split.positions(world.rank).shape[1]
        q, k, v = (torch.ones(3, h, n, 4, dtype=dtype) for h in (heads, keys, keys))
        q.requires_grad_()
        with observe(recorder := Recorder()):
            out = attention_by_heads(q, k, v, split, world, lambda q, k, v, heads: q, label="attn")
            out.sum().backward()
        labels = [f"attn {way}" for way in ("by head forward", "by position forward")]
        labels += [f"attn {way}" for way in ("by head backward", "by position backward")]
        assert [c.label for c in recorder.collectives] == labels
        there, back, back_again, gradients = (c.bytes for c in recorder.collectives)
        # What a rank has for itself is in the message, and does not travel.
        assert there == 3 * n * dtype.itemsize * 4 * (heads + 2 * max(keys, world.size))
        assert back_again == 3 * n * dtype.itemsize * 4 * heads
        for mine, theirs in ((back, back_again), (gradients, there)):
            sums = world.gather_numbers([mine, theirs], label="bytes")
            assert sum(a for a, _ in sums) == sum(b for _, b in sums)


@pytest.mark.parametrize("count", [2, 4])
def test_bytes(ranks: Ranks, count: int) -> None:
    ranks(count, body_bytes)


def body_others() -> None:
    world = comm.communicator()
    split = ContextSplit.of([[9]], 2, "zigzag")
    n = split.positions(world.rank).shape[1]
    draw = torch.Generator().manual_seed(world.rank)
    q, k, v = (
        torch.randn(2, 2, n, 3, generator=draw, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: range) -> torch.Tensor:
        return (q @ k.mT).tanh() @ v.to(q.dtype)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_by_heads(q, k, v, split, world, attend, label="attn")

    # Twice differentiable: the gradient of a gradient is that of a finite difference.
    def slope(q: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(run(q, k, v).square().sum(), q, create_graph=True)[0]

    found = torch.autograd.grad(slope(q).square().sum(), q)[0]
    towards, step = torch.ones_like(q) * (world.rank + 1), 1e-5
    ends = [slope(q + sign * step * towards).square().sum() for sign in (1, -1)]
    both = torch.stack([(found * towards).sum(), (ends[0] - ends[1]) / (2 * step)]).detach()
    world.all_reduce(both).wait()
    torch.testing.assert_close(both[0], both[1], rtol=1e-6, atol=0)
    # Other dtypes travel alone; bits are the same on every run.
    whole = run(q, k, v)
    with observe(recorder := Recorder()):
        mixed = run(q, k, v.float())
        assert torch.equal(run(q, k, v), whole)
    assert [c.kind for c in recorder.collectives] == ["all_to_all"] * 6
    torch.testing.assert_close(mixed, whole, rtol=1e-5, atol=1e-5)


def test_double_backward_and_other_dtypes(ranks: Ranks) -> None:
    ranks(2, body_others)


def body_refusals() -> None:
    world = comm.communicator()
    split = ContextSplit.of([[8]], 4)

    def run(heads: int, keys: int, n: int = 2, rows: int = 1, wrong: bool = False) -> None:
        q, k, v = (torch.ones(rows, h, n, 3) for h in (heads, keys, keys))
        attention_by_heads(
            q, k, v, split, world, lambda q, k, v, own: q.mT if wrong else q, label="layers.0.attn"
        )

    axis = f"axis {world.axis} = 4: 'layers.0.attn' has"
    do = r'Set method = "ring" in \[context\], which splits no heads'
    with pytest.raises(ValueError, match=f"{axis} 6 query heads, which 4 does not divide. {do}"):
        run(6, 6)
    with pytest.raises(ValueError, match=f"{axis} 6 key heads: .* {do}"):
        run(12, 6)
    with pytest.raises(ValueError, match=r"got 1 rows with \[3, 3, 3\] positions .* expected 2"):
        run(4, 4, n=3)
    with pytest.raises(ValueError, match=r"returned shape \(1, 1, 3, 8\), expected \(1, 1, 8, 3\)"):
        run(4, 4, wrong=True)
    run(8, 8, rows=5)


def test_refusals(ranks: Ranks) -> None:
    ranks(4, body_refusals)


@pytest.mark.devices("host", reason="only a wait of the host says in which exchange it was")
@pytest.mark.parametrize("exchange", ["by head forward", "by position backward"])
def test_a_rank_that_is_killed_in_an_exchange_is_named(ranks: Ranks, exchange: str) -> None:
    def body() -> None:
        world = comm.communicator()
        inputs = Inputs(Case(ONE, {}))

        class Kill(Recorder):
            def issued(self, collective: Collective) -> None:
                if collective.label == f"attn {exchange}" and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        own = [inputs.split.part(x, world.rank, 2).requires_grad_() for x in inputs.given]
        with observe(Kill()):
            by_heads(inputs, *own, None).sum().backward()

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=10.0)
    (other,) = (outcome for outcome in caught.value.outcomes if outcome.rank != 1)
    text = other.details()
    assert f"attn {exchange}" in text, text
    assert "rank 1 failed first" in text and "its process has ended" in text, text
    assert other.seconds < 30  # on any machine; `soak/kills.py --inside` measures how soon it was
