"""Attention by parts of the keys equals one process, and sends what is seen and no more."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from meshwright import comm
from meshwright.comm import Recorder, observe
from meshwright.testing import Ending, Ranks, RanksFailed
from meshwright.testing.simulated import device_of
from support.context_parallel.attention import (
    CLOSE,
    KINDS,
    METHODS,
    Case,
    Inputs,
    allowed,
    by_blocks_of,
    compare,
)
from support.internals.context_parallel import (
    ContextSplit,
    MaskWords,
    attend_keys,
    attend_keys_backward,
    attention_by_heads,
    plan_blocks,
    ring_attention,
)
from support.internals.timeline import Collective

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


def rows_seen(inputs: Inputs, rows: int, owner: int, reader: int) -> int:
    """Count the keys of a rank that queries of another see, from the mask of the whole."""
    held = [inputs.split.positions(rank) for rank in (owner, reader)]
    mask = inputs.mask[:, 0].cpu().expand(rows, -1, -1)
    count = 0
    for row in range(rows):
        of_owner, of_reader = (at[row % len(at)] for at in held)
        count += int(mask[row][of_reader][:, of_owner].any(0).sum())
    return count


def body_rows() -> None:
    """Sent are the rows that some query of the other rank sees, and as many gradients."""
    world = comm.communicator()
    for case in QUICK:
        by_blocks_of(256)
        inputs = Inputs(case)
        own = [inputs.split.part(x, world.rank, 2).requires_grad_() for x in inputs.given]
        with observe(recorder := Recorder()):
            out = ring(inputs, *own, None)
        forward = recorder.collectives
        with observe(recorder := Recorder()):
            out.sum().backward()
        backward = recorder.collectives
        width = case.heads[1] * (case.d + case.dv) * 8
        others = [r for r in range(world.size) if r != world.rank]
        going = {r: width * rows_seen(inputs, case.rows, world.rank, r) for r in others}
        coming = {r: width * rows_seen(inputs, case.rows, r, world.rank) for r in others}
        # No message where nothing is seen.
        going, coming = ({r: n for r, n in way.items() if n} for way in (going, coming))

        def moved(found: list[Collective], kind: str, what: str) -> dict[int | None, int]:
            return {c.peer: c.bytes for c in found if c.kind == kind and c.label.endswith(what)}

        assert len(forward) == len(going) + len(coming), case
        assert moved(forward, "send", "forward") == going, case
        assert moved(forward, "recv", "forward") == coming, case
        assert len(backward) == 2 * len(forward), case
        assert moved(backward, "send", "backward") == going, case
        assert moved(backward, "recv", "gradients") == going, case
        assert moved(backward, "send", "gradients") == coming, case
        assert all(c.label.startswith("attn ring step ") for c in [*forward, *backward])


@pytest.mark.parametrize("count", [2, 4])
def test_only_rows_that_are_seen_travel(ranks: Ranks, count: int) -> None:
    ranks(count, body_rows)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.booleans(),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
)
def test_ranges_are_the_words(
    lengths: list[int], causal: bool, window: int | None, chunk: int | None
) -> None:
    words = MaskWords(causal, window, chunk)
    at, documents = torch.arange(sum(lengths)), ContextSplit.of([lengths], 1).documents()[0]
    ends = torch.tensor(lengths).cumsum(0)
    first, stop = words.seen_from(at, (ends - torch.tensor(lengths))[documents], ends[documents])
    seen = (at >= first.unsqueeze(1)) & (at < stop.unsqueeze(1))
    assert torch.equal(seen, allowed(words, ContextSplit.of([lengths], 1))[0])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60), st.integers(1, 9))
def test_blocks_have_each_pair_once(pairs: list[tuple[int, int]], most: int) -> None:
    first = torch.tensor(sorted(a for a, _ in pairs), dtype=torch.int64)
    stop = torch.maximum(first, torch.tensor(sorted(b for _, b in pairs), dtype=torch.int64))
    keys = torch.arange(41)
    seen = (keys >= first.unsqueeze(1)) & (keys < stop.unsqueeze(1))
    times = torch.zeros_like(seen, dtype=torch.int64)
    for block in plan_blocks(first, stop, most):
        part = (block.queries, block.keys)
        assert block.queries.stop - block.queries.start <= most
        times[part] += 1
        assert not block.is_full or seen[part].all()
    assert bool((times[seen] == 1).all())
    assert not times.numel() or int(times.max()) <= 1


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("length", [64, 300, 8192])
def test_blocks_cover_little_that_is_not_seen(length: int, window: int | None) -> None:
    """Of a packed row; masks are of some hundred queries and keys, and most keys have none."""
    at = torch.arange(8192)
    first, stop = at // length * length, at + 1
    if window is not None:
        first = torch.maximum(first, stop - window)
    blocks = plan_blocks(first, stop, 256)
    sizes = [(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks]
    seen = int((stop - first).sum())
    assert sum(sizes) < seen + 8192 * 256
    assert max(n for n, b in zip(sizes, blocks, strict=True) if not b.is_full) <= 256 * 1024
    masked = sum(n for n, b in zip(sizes, blocks, strict=True) if not b.is_full)
    assert masked <= 8192 * (768 if length < 8192 or window else 272)


def body_dtypes() -> None:
    """Of less precision: as near to float64 as the operator of one process is."""
    world = comm.communicator()
    case = Case(((61, 35),), {}, (4, 2), sinks=True, blocks=16)
    by_blocks_of(16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found: list[list[torch.Tensor]] = []
        for to in (torch.float64, dtype):
            inputs = Inputs(case, dtype)
            given = [*inputs.given, inputs.sinks]
            own = [inputs.split.part(x, world.rank, 2) for x in given[:3]] + given[3:]
            own = [x.to(to).requires_grad_() for x in own]
            out = ring(inputs, *own)
            assert out.dtype == to
            out.backward(inputs.split.part(inputs.weigh, world.rank, 2).to(to))
            found.append([out.detach(), *(x.grad for x in own)])
            assert all(x.dtype == to for x in found[-1])
            again = ring(inputs, *own)
            assert torch.equal(again, out)
        close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        for wide, narrow in zip(*found, strict=True):
            torch.testing.assert_close(narrow.double(), wide, **close)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = Inputs(case, torch.float32)
        own = [inputs.split.part(x, world.rank, 2).requires_grad_() for x in inputs.given]
        out = ring(inputs, *own, inputs.sinks)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and own[0].grad.dtype == torch.float32


@pytest.mark.slow
def test_other_dtypes(ranks: Ranks) -> None:
    ranks(2, body_dtypes)


def body_changes() -> None:
    """A padding that a loader writes anew is seen, and gradients of expanded outputs are right."""
    world = comm.communicator()
    inputs = Inputs(Case(ONE, {}, padded=(0, 11)))
    own = [inputs.split.part(x, world.rank, 2) for x in inputs.given]
    before = ring(inputs, *own, None)
    inputs.words.padding[:] = inputs.words.padding.flip(0)
    after = ring(inputs, *own, None)
    assert not torch.equal(before, after)
    fresh = Inputs(Case(ONE, {}, padded=(11, 0)))
    assert torch.equal(after, ring(fresh, *own, None))
    words = MaskWords(padding=torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"padding of 'attn' has shape \(2, 7\), expected"):
        ring_attention(*own, inputs.split, world, words, label="attn")
    with pytest.raises(
        ValueError, match=r"heads of queries, keys and values .* expected one dtype"
    ):
        ring_attention(*own[:2], own[2].float(), inputs.split, world, MaskWords(), label="attn")
    with pytest.raises(ValueError, match=r"got 2 rows with \[29, 29, 29\] positions"):
        ring_attention(*inputs.given, inputs.split, world, MaskWords(), label="attn")


def test_padding_is_read_anew_and_refusals(ranks: Ranks) -> None:
    ranks(2, body_changes)


class Efficient:
    """What CUDA's operator wants and returns, by the same of plain products."""

    def check(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> None:
        assert q.shape[1] == k.shape[1]
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2])
            assert bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0

    def forward(self, q: Any, k: Any, v: Any, bias: Any, has_lse: bool, *, scale: float) -> Any:
        self.check(q, k, bias)
        scores = q @ k.mT * scale + (0 if bias is None else bias)
        lines = -(-q.shape[2] // 32) * 32
        lse = torch.full((*q.shape[:2], lines), torch.inf)
        lse[..., : q.shape[2]] = scores.logsumexp(-1)
        return scores.softmax(-1) @ v, lse, torch.zeros(()), torch.zeros(())

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *more: Any, **a: Any
    ) -> Any:
        self.check(q, k, bias)
        seed, offset, dropout, mask = more
        assert seed.dtype == offset.dtype == torch.int64 and dropout == 0 and not mask[3]
        assert lse.shape[-1] % 32 == 0 and lse.stride(-1) == 1
        lse = lse[..., : q.shape[2]]
        scale = a["scale"]
        weights = (q @ k.mT * scale + (0 if bias is None else bias) - lse.unsqueeze(-1)).exp()
        slopes = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return slopes @ k, slopes.mT @ q, weights.mT @ grad, None


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("dv", [8, 12])
def test_operators_agree(monkeypatch: pytest.MonkeyPatch, has_mask: bool, dv: int) -> None:
    """The host's operator, that of CUDA by its contract, and plain products."""
    module, efficient = sys.modules[attend_keys.__module__], Efficient()
    monkeypatch.setattr(module, "EFFICIENT_ATTENTION", (efficient.forward, efficient.backward))
    q, grad, k, v = (
        torch.randn(2, heads, n, d)
        for heads, n, d in ((4, 37, 8), (4, 37, dv), (2, 21, 8), (2, 21, dv))
    )
    bias = None
    if has_mask:
        bias = torch.zeros(1, 1, 37, 21).masked_fill(torch.rand(37, 21) < 0.4, -torch.inf)
        bias[..., 0] = 0
    found = []
    for is_host, is_efficient in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(module, "is_host", lambda device, is_host=is_host: is_host)
        monkeypatch.setattr(module, "_is_efficient", lambda q, v, it=is_efficient: it)
        out, lse = attend_keys(q, k, v, bias, 0.3)
        # As if other keys had as much weight.
        whole = lse + 0.7
        grads = attend_keys_backward(grad, q, (k, v), out * 0.5, whole, bias, 0.3)
        found.append([out, lse, *grads])
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            torch.testing.assert_close(x, y)


def body_waits() -> None:
    """On a device: accesses that are not ordered fail the test, and the host waits for nothing."""
    world = comm.communicator()
    inputs = Inputs(Case(OTHERS, {}, (4, 2), dv=5, sinks=True, padded=(0, 7), method="zigzag"))
    by_blocks_of(8)
    device = device_of(world)
    split = inputs.split
    own = [split.part(x, world.rank, 2).requires_grad_() for x in inputs.given]
    sinks = inputs.sinks.clone().requires_grad_()

    def step() -> torch.Tensor:
        out = ring(inputs, *own, sinks)
        out.backward(torch.ones_like(out))
        return out

    for _ in range(2):
        out = step()
    before = len(device.stops)
    for x in (*own, sinks):
        x.grad = None
    out = step()
    assert not device.stops[before:], [str(stop) for stop in device.stops[before:]]
    leaves = [x.clone().requires_grad_() for x in (*inputs.given, inputs.sinks)]
    whole = inputs.attend(*leaves)
    part = split.part(whole.detach(), world.rank, 2)
    torch.testing.assert_close(out.detach(), part, rtol=1e-12, atol=1e-12)
    whole.sum().backward()
    world.all_reduce(sinks.grad).wait()
    for x, leaf in zip(own, leaves, strict=False):
        part = split.part(leaf.grad, world.rank, 2)
        torch.testing.assert_close(x.grad, part, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sinks.grad, leaves[3].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.devices("simulated", reason="a host waits for no device")
@pytest.mark.parametrize("count", [2, 4])
def test_a_device_orders_steps_and_stops_no_host(ranks: Ranks, count: int) -> None:
    ranks(count, body_waits)


@pytest.mark.devices("host", reason="only a wait of the host says in which step it was")
@pytest.mark.parametrize("direction", ["forward", "backward", "gradients"])
def test_a_rank_that_is_killed_in_a_step_is_named(ranks: Ranks, direction: str) -> None:
    def body() -> None:
        world = comm.communicator()
        inputs = Inputs(Case(ONE, {"causal": False}))

        class Kill(Recorder):
            def issued(self, collective: Collective) -> None:
                if collective.label == f"attn ring step 2 {direction}" and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        own = [inputs.split.part(x, world.rank, 2).requires_grad_() for x in inputs.given]
        with observe(Kill()):
            ring(inputs, *own, None).sum().backward()

    with pytest.raises(RanksFailed) as caught:
        ranks(4, body, grace=10.0)
    # A rank that needs nothing more of it may have ended.
    others = [outcome for outcome in caught.value.outcomes if outcome.rank != 1]
    texts = [outcome.details() for outcome in others if outcome.ending != Ending.RETURNED]
    assert any("attn ring step" in text for text in texts), texts
    for text in texts:
        assert "rank 1 failed first" in text and "its process has ended" in text, text
    assert max(outcome.seconds for outcome in others) < 10


def body_groups() -> None:
    """The axis is some ranks of the world; recomputed; in a compiled function."""
    world = comm.communicator()
    axis = comm.subgroup(world, [[0, 2], [1, 3]], "context")
    case = Case(PACKED, {}, (4, 2), sinks=True)
    inputs = Inputs(case)
    split = ContextSplit.of(case.documents, 2)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: range) -> torch.Tensor:
            return inputs.attend(q, k, v, inputs.sinks[own.start : own.stop])

        return attention_by_heads(q * 1.5, k, v, split, axis, attend, label="attn")

    def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        words = {"scale": 0.3, "sinks": inputs.sinks, "label": "attn"}
        return ring_attention(q * 1.5, k, v, split, axis, inputs.words, **words)

    whole = [x.clone().requires_grad_() for x in inputs.given]
    expected = inputs.attend(1.5 * whole[0], *whole[1:], inputs.sinks)
    expected.backward(inputs.weigh)
    for run in (heads, parts):
        compiled = torch.compile(run, backend="eager")
        again = functools.partial(checkpoint, run, use_reentrant=False)
        for call in (run, again, compiled):
            own = [split.part(x, axis.rank, 2).requires_grad_() for x in inputs.given]
            found = call(*own)
            torch.testing.assert_close(found, split.part(expected, axis.rank, 2), **CLOSE)
            found.backward(split.part(inputs.weigh, axis.rank, 2))
            for x, leaf in zip(own, whole, strict=True):
                torch.testing.assert_close(x.grad, split.part(leaf.grad, axis.rank, 2), **CLOSE)


@pytest.mark.devices("host", reason="nothing is compiled under a dispatch mode")
def test_groups_recomputation_and_compilation(ranks: Ranks) -> None:
    ranks(4, body_groups)
