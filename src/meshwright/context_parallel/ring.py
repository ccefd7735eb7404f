"""Attention by parts of the keys: keys travel to the queries that see them, gradients come back.

::

    step of rank 0    0                 1                 2
    computes with     own keys          keys of rank 3    keys of rank 2    .. merged each time
    on their way      keys of rank 3    keys of rank 2    keys of rank 1

Only keys that some query of the other rank sees travel. Who needs which follows from the split and
the words of the mask, so every rank knows it of all ranks. The backward receives the keys again,
computes its part of each gradient with the output and the log-sum-exp (lse) of the whole, and
sends those of the keys to their owners, which add them up in the order of the steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwright.comm import Communicator, Transfer
from meshwright.comm.streams import is_host, moved
from meshwright.context_parallel.heads import check_parts
from meshwright.context_parallel.masks import MaskWords
from meshwright.context_parallel.split import ContextSplit, RowSplit
from meshwright.torch_internals.tensors import EFFICIENT_ATTENTION, FLASH_ATTENTION
from meshwright.torch_internals.tracing import not_traced

HOST_QUERIES, DEVICE_QUERIES = 256, 2048
"""The most queries of one call of an operator: no mask has more rows."""
_EFFICIENT = (torch.float32, torch.bfloat16, torch.float16)
_Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


@not_traced
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: ContextSplit,
    axis: Communicator,
    words: MaskWords,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    label: str,
) -> Tensor:
    """Compute attention of this rank's positions, (batch, query heads, n, dv).

    ``q`` (batch, query heads, n, d), ``k`` and ``v`` (batch, key heads, n, d and dv) are this
    rank's positions of ``split``. ``scale`` is 1 / sqrt(d) unless given. ``sinks`` (query heads)
    are logits that take weight from the keys; each rank computes a summand of their gradient. A
    query that sees no key gets zeros.

    Raises ValueError for tensors that are not this rank's part.
    """
    check_parts(q, k, v, split, axis, label)
    padding = words.padding
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or len({q.dtype, k.dtype, v.dtype}) > 1:
        found = ", ".join(f"{x.shape[1]} of {x.dtype}" for x in (q, k, v))
        raise ValueError(
            f"axis {axis.axis}: '{label}' has heads of queries, keys and values {found}: expected "
            "one dtype, and as many heads of values as of keys, which divide those of queries"
        )
    if padding is not None and padding.shape not in ((1, split.length), (len(q), split.length)):
        raise ValueError(
            f"axis {axis.axis}: padding of '{label}' has shape {tuple(padding.shape)}, expected "
            f"({len(q)}, {split.length}): that of the whole, not of this rank's part"
        )
    plan = _plan(
        split,
        axis.rank,
        (words.causal, words.window, words.chunk),
        # By its values: a loader may write into one buffer again and again.
        None if padding is None else padding.numpy().tobytes(),
        len(q),
        q.device,
        HOST_QUERIES if is_host(q.device) else DEVICE_QUERIES,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    ring = _Ring(axis, label, plan, scale)
    return _RingAttention.apply(ring, _dense(q), _dense(k), _dense(v), sinks)


# ------------------------------------------------------------------- who needs which keys


class _Keys(NamedTuple):
    """Some tokens of a rank."""

    at: Tensor | None
    """Which of that rank's; None: all."""
    count: int

    def of(self, x: Tensor) -> Tensor:
        return x if self.at is None else x.index_select(2, self.at)


class _AttentionBlock(NamedTuple):
    """Queries, and a range of the keys of a part."""

    queries: slice
    keys: slice
    is_full: bool
    """Every query sees every key."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The keys of one rank that queries of this rank see."""

    keys: _Keys
    first: Tensor
    """The first of them that each query sees."""
    stop: Tensor
    """The one after the last."""
    blocks: Sequence[_AttentionBlock]

    def bias(self, block: _AttentionBlock, dtype: torch.dtype, *, forward: bool) -> tuple[Any, Any]:
        """Return the float mask of a block, and which of its queries see nothing of it."""
        if block.is_full:
            return None, None
        keys = torch.arange(block.keys.start, block.keys.stop, device=self.first.device)
        seen = keys >= self.first[block.queries].unsqueeze(1)
        seen &= keys < self.stop[block.queries].unsqueeze(1)
        blind = ~seen.any(1)
        if forward:  # no softmax over nothing, which may be NaN: the merge gives it no weight
            seen |= blind.unsqueeze(1)
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, -math.inf)[None, None], blind


class _RowGroup(NamedTuple):
    """Rows of the batch that have the same documents and padding."""

    rows: slice
    parts: list[_Part]
    """By the rank that has the keys."""
    sent: list[_Keys]
    """Those of this rank's tokens that each rank sees."""


@functools.lru_cache(maxsize=16)
def _plan(
    split: ContextSplit,
    rank: int,
    words: tuple[bool, int | None, int | None],
    padding: bytes | None,
    rows: int,
    device: torch.device,
    most: int,
) -> list[_RowGroup]:
    """Plan the attention of ``rank``, on the host. All layers and passes of a batch share it."""
    splits = split.rows * (rows if len(split.rows) == 1 else 1)
    each = [padding] * rows
    if padding is not None:
        count = len(padding) // split.length
        lines = [padding[i * split.length : (i + 1) * split.length] for i in range(count)]
        each = lines * (rows if count == 1 else 1)
    found: list[_RowGroup] = []
    start = 0
    for (row, kept), same in itertools.groupby(zip(splits, each, strict=True)):
        stop = start + len(list(same))
        parts, sent = _plan_row(row, kept, MaskWords(*words), rank, device, most)
        found.append(_RowGroup(slice(start, stop), parts, sent))
        start = stop
    return found


def _plan_row(
    row: RowSplit, kept: bytes | None, words: MaskWords, rank: int, device: torch.device, most: int
) -> tuple[list[_Part], list[_Keys]]:
    alone = ContextSplit((row,))
    positions = [alone.positions(each)[0] for each in range(alone.ranks)]
    begins, ends = (x[0] for x in alone.bounds())
    ranges: list[_Pair] = []
    needed: list[Tensor] = []
    for held in positions:
        first, stop = words.seen_from(held, begins[held], ends[held])
        ranges.append((first, stop))
        # How many queries of that rank see a position, by how many begin and end before it.
        steps = torch.zeros(alone.length + 1, dtype=torch.int64, device="cpu")
        steps.index_add_(0, first, torch.ones_like(first))
        steps.index_add_(0, stop, -torch.ones_like(stop))
        needed.append(steps.cumsum(0)[:-1] > 0)
        if kept is not None:
            needed[-1] &= torch.frombuffer(bytearray(kept), dtype=torch.bool)

    def keys_of(of: int, by: int) -> tuple[Tensor, _Keys]:
        at = needed[by][positions[of]].nonzero().flatten()
        is_all = len(at) == len(positions[of])
        return positions[of][at], _Keys(None if is_all else moved(at, device), len(at))

    first, stop = ranges[rank]
    parts: list[_Part] = []
    sent: list[_Keys] = []
    for other in range(alone.ranks):
        held, keys = keys_of(other, rank)
        a, b = torch.searchsorted(held, first), torch.searchsorted(held, stop)
        parts.append(_Part(keys, moved(a, device), moved(b, device), _blocks(a, b, most)))
        sent.append(keys_of(rank, other)[1])
    return parts, sent


def _blocks(first: Tensor, stop: Tensor, most: int) -> list[_AttentionBlock]:
    """Cut the queries of a part into blocks of ``most``, each with the range of keys it sees.

    They are also cut where the range jumps, so a block of short documents sees little of others.
    """
    jumps = (1 + (first.diff() + stop.diff() > most // 4).nonzero().flatten()).tolist()
    seeing = (stop > first).nonzero().flatten().tolist()
    firsts, stops = first.tolist(), stop.tolist()
    found: list[_AttentionBlock] = []
    at = 0
    while at < len(seeing):
        start = seeing[at]
        end = min([start + most, *jumps[(i := bisect_right(jumps, start)) : i + 1]])
        at = bisect_left(seeing, end)
        end = seeing[at - 1] + 1
        # What some see, and what all see. Both bounds rise, so the ends of the block have them.
        low, high, inner, outer = firsts[start], stops[end - 1], firsts[end - 1], stops[start]
        if outer - inner < min(2 * most, high - low):
            inner = outer = high
        for a, b, full in ((low, inner, False), (inner, outer, True), (outer, high, False)):
            if a < b:
                found.append(_AttentionBlock(slice(start, end), slice(a, b), full))
    return found


# ------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class _Ring:
    axis: Communicator
    label: str
    plan: list[_RowGroup]
    scale: float

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the lse, which has the sinks' part."""
        wide, (rows, heads, n, _) = _wide(q), q.shape
        # Heads next to each other in memory, as models go on with them.
        out = q.new_zeros((rows, n, heads, v.shape[-1]), dtype=wide).transpose(1, 2)
        lse = q.new_full((rows, heads, n), -math.inf, dtype=wide)

        def compute(owner: int, pairs: list[_Pair]) -> None:
            for group, (keys, values) in zip(self.plan, pairs, strict=True):
                for block in group.parts[owner].blocks:
                    at = (group.rows, slice(None), block.queries)
                    bias, blind = group.parts[owner].bias(block, q.dtype, forward=True)
                    here = keys[:, :, block.keys], values[:, :, block.keys]
                    y, its_lse = _attend(q[at], *here, bias, self.scale)
                    if blind is not None:
                        its_lse = its_lse.masked_fill(blind, -math.inf)
                    _merge(out[at], lse[at], y, its_lse)

        self._in_steps((k, v), "forward", compute)
        if sinks is not None:  # a key of each head, without a value
            _merge(out, lse, out.new_zeros(1), sinks.to(wide).view(-1, 1))
        return out.to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, pair: _Pair, out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        wide, size, rank = _wide(q), self.axis.size, self.axis.rank
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, *pair))
        late: list[Callable[[], None]] = []

        def add(kept: list[_Keys], sums: list[_Pair]) -> None:
            for group, keys, of_pair in zip(self.plan, kept, sums, strict=True):
                for total, x in zip((dk[group.rows], dv[group.rows]), of_pair, strict=True):
                    x = x.to(wide)
                    total.add_(x) if keys.at is None else total.index_add_(2, keys.at, x)

        def compute(owner: int, pairs: list[_Pair]) -> None:
            held = [group.parts[owner].keys for group in self.plan]
            message, sums = self._message(held, pair, wide)
            for group, (keys, values), total in zip(self.plan, pairs, sums, strict=True):
                for block in group.parts[owner].blocks:
                    at = (group.rows, slice(None), block.queries)
                    bias, _ = group.parts[owner].bias(block, q.dtype, forward=False)
                    here = keys[:, :, block.keys], values[:, :, block.keys]
                    given = grad[at], q[at], here, out[at], lse[at], bias
                    of_q, *of_pair = _attend_backward(*given, self.scale)
                    dq[at] += of_q
                    for x, summand in zip(total, of_pair, strict=True):
                        x[:, :, block.keys] += summand
            if owner == rank:
                add(held, sums)
                return
            step = (rank - owner) % size
            reader = (rank + step) % size
            sent = [group.sent[reader] for group in self.plan]
            what = f"{step} gradients"
            arriving = self._exchange(message.to(q.dtype), owner, sent, reader, pair, what)
            late.append(lambda: add(sent, arriving()))
            if len(late) > 1:
                late.pop(0)()

        self._in_steps(pair, "backward", compute)
        for last in late:
            last()
        return [x.to(q.dtype) for x in (dq, dk, dv)]

    def _in_steps(
        self, pair: _Pair, direction: str, compute: Callable[[int, list[_Pair]], None]
    ) -> None:
        """Call ``compute`` with the keys of each rank, while those of the next are on their way."""
        size, rank = self.axis.size, self.axis.rank
        own = [(group.parts[rank].keys, group.rows) for group in self.plan]
        here = [(keys.of(pair[0][rows]), keys.of(pair[1][rows])) for keys, rows in own]
        for step in range(1, size + 1):
            arriving = self._send_keys(step, pair, direction) if step < size else None
            compute((rank - step + 1) % size, here)
            if arriving is not None:
                here = arriving()

    def _send_keys(self, step: int, pair: _Pair, direction: str) -> Callable[[], list[_Pair]]:
        """Start to send own keys ``step`` ranks on, and to receive those of that many before."""
        size, rank = self.axis.size, self.axis.rank
        reader, owner = (rank + step) % size, (rank - step) % size
        going = [group.sent[reader] for group in self.plan]
        coming = [group.parts[owner].keys for group in self.plan]
        message, rooms = self._message(going, pair, pair[0].dtype)
        for group, keys, room in zip(self.plan, going, rooms, strict=True):
            for x, into in zip(pair, room, strict=True):
                into.copy_(keys.of(x[group.rows]))
        return self._exchange(message, reader, coming, owner, pair, f"{step} {direction}")

    def _exchange(
        self, sent: Tensor, to: int, kept: list[_Keys], source: int, like: _Pair, what: str
    ) -> Callable[[], list[_Pair]]:
        """Start to send to one rank and to receive ``kept`` from another; no empty messages."""
        found, pairs = self._message(kept, like, sent.dtype)
        label = f"{self.label} ring step {what}"
        ways: list[tuple[Literal["recv", "send"], Tensor, int]]
        ways = [("recv", found, source), ("send", sent, to)]
        transfers = [Transfer(way, x, peer, label=label) for way, x, peer in ways if len(x)]
        pendings = self.axis.batch(transfers) if transfers else []

        def wait() -> list[_Pair]:
            for pending in pendings:
                pending.wait()
            return pairs

        return wait

    def _message(
        self, kept: list[_Keys], like: _Pair, dtype: torch.dtype
    ) -> tuple[Tensor, list[_Pair]]:
        """Make a message, zeros, and views of it: keys and values of each group of rows."""
        shapes = [
            (group.rows.stop - group.rows.start, x.shape[1], keys.count, x.shape[-1])
            for group, keys in zip(self.plan, kept, strict=True)
            for x in like
        ]
        sizes = [*map(math.prod, shapes)]
        message = torch.zeros(sum(sizes), dtype=dtype, device=like[0].device)
        views = [x.view(s) for x, s in zip(message.split(sizes), shapes, strict=True)]
        return message, [*zip(views[::2], views[1::2], strict=True)]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - a node, which has no public type
        ring: _Ring,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = ring.forward(q, k, v, sinks)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        of_sinks = None
        # Of a query that sees nothing all weights are exp(-inf - 0) = 0.
        lse = lse.masked_fill(lse == -math.inf, 0)
        with torch.autocast(q.device.type, enabled=False):
            if sinks is not None:
                weight = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
                of_sinks = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2))
                of_sinks = of_sinks.to(sinks.dtype)
            return None, *ctx.ring.backward(_dense(grad), q, (k, v), out, lse), of_sinks


def _merge(out: Tensor, lse: Tensor, y: Tensor, its_lse: Tensor) -> None:
    """Add a part's output to that of the parts before, in place, each weighed by its lse."""
    whole = torch.logaddexp(lse, its_lse)
    above = whole.clamp(min=torch.finfo(whole.dtype).min)  # -inf - -inf would be NaN
    out *= (lse - above).exp().unsqueeze(-1)
    out += y * (its_lse - above).exp().unsqueeze(-1)
    lse.copy_(whole)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# ------------------------------------------------------------------- operators


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of queries and some keys."""
    if is_host(q.device):
        given = _padded(q, k, v)
        out, lse = FLASH_ATTENTION[0](*given, 0.0, False, attn_mask=bias, scale=scale)
        return out[..., : v.shape[-1]], lse
    times = q.shape[1] // k.shape[1]
    if _is_efficient(q, v):
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        bias = _expanded(bias, q, k)
        out, lse, _, _ = EFFICIENT_ATTENTION[0](q, k, v, bias, True, scale=scale)
        return out, lse[..., : q.shape[2]]
    scores, _, _, v = _scores(q, k, v, bias, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    pair: _Pair,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by some keys; ``out`` and ``lse`` are of all keys."""
    k, v = pair
    d, dv, times = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
    if is_host(q.device):
        grad, q, k, v, out = _padded(grad, q, k, v, out)
        dq, dk, dvalues = FLASH_ATTENTION[1](
            grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
        )
        return dq[..., :d], dk[..., :d], dvalues[..., :dv]
    if _is_efficient(q, v):
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        # The operator reads whole lines of 32 queries.
        lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        given = grad, q, k, v, _expanded(bias, q, k), out, lse, none, none, 0.0
        dq, dk, dvalues, _ = EFFICIENT_ATTENTION[1](*given, [True, True, True, False], scale=scale)
        dk, dvalues = (x.unflatten(1, (-1, times)).sum(2) for x in (dk, dvalues))
        return dq, dk, dvalues
    scores, q, k, v = _scores(q, k, v, bias, scale)
    weights = (scores - lse.unflatten(1, (-1, times)).unsqueeze(-1)).exp()
    grad, out = (x.unflatten(1, (-1, times)).to(scores.dtype) for x in (grad, out))
    dvalues = (weights.mT @ grad).sum(2)
    slopes = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return (slopes @ k).flatten(1, 2), (slopes.mT @ q).sum(2), dvalues


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Give all the longest features, as the host's operator wants it, by zeros."""
    width = max(x.shape[-1] for x in tensors)
    each = ((x, width - x.shape[-1]) for x in tensors)
    return [functional.pad(x, (0, more)) if more else x for x, more in each]


def _is_efficient(q: Tensor, v: Tensor) -> bool:
    """Whether CUDA's operator can: it wants heads of 16 bytes, and knows no float64."""
    sizes = (x.shape[-1] * x.element_size() for x in (q, v))
    return q.device.type == "cuda" and q.dtype in _EFFICIENT and not any(n % 16 for n in sizes)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand a mask as CUDA's operator wants it: for each head, lines of whole 16 numbers apart."""
    if bias is None:
        return None
    lines = functional.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]
    return lines.expand(*q.shape[:3], k.shape[2])


def _scores(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, and q, k and v in their dtype: (rows, key heads, queries of each, n, ..)."""
    wide = _wide(q)
    q = q.unflatten(1, (k.shape[1], -1)).to(wide)
    k, v = k.unsqueeze(2).to(wide), v.unsqueeze(2).to(wide)
    scores = q @ k.mT * scale
    return scores if bias is None else scores + bias.unsqueeze(2).to(wide), q, k, v
