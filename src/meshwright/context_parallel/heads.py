"""Attention by heads: each rank computes whole sequences, for its share of the heads.

::

    q (B, Hq, n, d), k, v (B, Hkv, n, ..)          this rank's positions, all heads
      └── all-to-all, one message ───────────────> (B, Hq / C, T, d) ..  all positions, some heads
                                                       │ attend
    out (B, Hq, n, dv) <────────── all-to-all ──── (B, Hq / C, T, dv)

Either message is the adjoint of the other, so one autograd node does both, in both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Communicator
from meshwright.comm.graphs.untraced import untraced
from meshwright.comm.streams import moved
from meshwright.context_parallel.split import ContextSplit

Attend = Callable[[Tensor, Tensor, Tensor, range], Tensor]
"""Attention of whole sequences: q, k, v, and which query heads of the model these are."""


def heads_divide(queries: int, keys: int, ranks: int) -> bool:
    """Whether so many heads of queries, and of keys, split over ``ranks``."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def attention_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: ContextSplit,
    axis: Communicator,
    attend: Attend,
    *,
    label: str,
) -> Tensor:
    """Compute attention of this rank's positions, (batch, query heads, n, dv).

    ``q`` (batch, query heads, n, d), ``k`` and ``v`` (batch, key heads, n, d and dv) are this
    rank's positions of ``split``. ``attend`` is given all positions in their order, for a share of
    the heads, and returns (batch, its query heads, length, dv). It may use any mask.

    Key heads divide by the number of ranks, or it by them: then ranks share them.

    Raises ValueError for numbers of heads that do not divide, and for other positions.
    """
    untraced(check_parts, q, k, v, split, axis, label)
    size, heads = axis.size, (q.shape[1], k.shape[1], v.shape[1])
    where = f"axis {axis.axis} = {size}: '{label}' has"
    to_do = 'Set method = "ring" in [context], which splits no heads'
    if heads[0] % size:
        raise ValueError(f"{where} {heads[0]} query heads, which {size} does not divide. {to_do}")
    if not heads_divide(heads[0], heads[1], size):
        raise ValueError(
            f"{where} {heads[1]} key heads: {size} does not divide them, nor they {size}. {to_do}"
        )
    each = heads[0] // size
    own = range(axis.rank * each, (axis.rank + 1) * each)
    if axis.is_alone:
        return attend(q, k, v, own)
    way = _Way(axis, label, split)
    here: Any = untraced(_HeadExchange.apply, way, heads, False, "forward", q, k, v)
    out = attend(here[0], here[1], here[2], own)
    expected = (len(q), each, split.length, v.shape[3])
    if out.shape != expected:
        raise ValueError(
            f"axis {axis.axis}: attention of '{label}' on rank {axis.rank} returned shape "
            f"{tuple(out.shape)}, expected {expected}: batch, heads, positions, features"
        )
    back: Any = untraced(_HeadExchange.apply, way, heads[:1], True, "forward", out)
    return back[0]


def check_parts(
    q: Tensor, k: Tensor, v: Tensor, split: ContextSplit, axis: Communicator, label: str
) -> None:
    """Refuse tensors that are not this rank's positions of ``split``."""
    own = sum(stop - start for start, stop in split.rows[0].parts[axis.rank])
    found = [x.shape[2] if x.ndim == 4 else tuple(x.shape) for x in (q, k, v)]
    if split.ranks != axis.size or found != [own] * 3 or len(split.rows) not in (1, len(q)):
        raise ValueError(
            f"axis {axis.axis}: '{label}' on rank {axis.rank} of {axis.size} got {len(q)} rows "
            f"with {found} positions of queries, keys and values, expected {own} of each: the "
            f"split is of {len(split.rows)} rows of {split.length} tokens over {split.ranks} ranks"
        )


@functools.lru_cache(maxsize=16)
def _orders(split: ContextSplit, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the position of each token rank by rank, and the inverse: (length, rows), or None."""
    given = torch.cat([split.positions(rank) for rank in range(split.ranks)], 1)
    order = given.argsort(1)
    if torch.equal(order, given) and bool((order.diff() == 1).all()):
        return None
    return moved(given.t().contiguous(), device), moved(order.t().contiguous(), device)


@dataclass(frozen=True, slots=True)
class _Way:
    """Between parts by position and parts by head, for tensors of one attention."""

    axis: Communicator
    label: str
    split: ContextSplit

    def moved(
        self, tensors: Sequence[Tensor], heads: Sequence[int], direction: str, *, back: bool
    ) -> list[Tensor]:
        """Exchange tensors whose whole has ``heads`` heads, all of one dtype in one message."""
        if len({x.dtype for x in tensors}) > 1:
            pairs = zip(tensors, heads, strict=True)
            return [self.moved([x], [h], direction, back=back)[0] for x, h in pairs]
        size, rows = self.axis.size, len(tensors[0])
        counts = [sum(stop - start for start, stop in part) for part in self.split.rows[0].parts]
        own = counts[self.axis.rank]
        orders = _orders(self.split, tensors[0].device) or (None, None)
        # Each as (.., rows, heads of a rank, features), before that (ranks, n) or all tokens.
        if back:
            parts = [_taken(x.permute(2, 0, 1, 3), orders[0]) for x in tensors]
        else:
            parts = [_by_rank(x, h, size) for x, h in zip(tensors, heads, strict=True)]
        widths = [part.shape[-2] * part.shape[-1] for part in parts]
        sent = parts[0].new_empty((*parts[0].shape[:-2], sum(widths)))
        for part, column in zip(parts, sent.split(widths, -1), strict=True):
            column.unflatten(-1, part.shape[-2:]).copy_(part)
        going, coming = (counts, [own] * size) if back else ([own] * size, counts)
        found = sent.new_empty((sum(coming), rows, sum(widths)))
        self.axis.all_to_all(
            found,
            sent.view(-1, rows, sum(widths)),
            output_splits=coming,
            input_splits=going,
            label=f"{self.label} {'by position' if back else 'by head'} {direction}",
        ).wait()
        arrived = []
        for part, column, h in zip(parts, found.split(widths, -1), heads, strict=True):
            here = column.unflatten(-1, part.shape[-2:])
            if back:
                arrived.append(_all_heads(here.unflatten(0, (size, own)), h))
            else:  # in memory of its own, whatever came along
                whole = _taken(here, orders[1]).contiguous()
                arrived.append(whole.permute(1, 2, 0, 3))
        return arrived


def _taken(x: Tensor, order: Tensor | None) -> Tensor:
    """Order the tokens of ``x`` (tokens, rows, ..), each row by its column of ``order``."""
    if order is None:
        return x
    if order.shape[1] == 1:
        return x.index_select(0, order[:, 0])
    return x[order, torch.arange(order.shape[1], device=x.device)]


def _by_rank(x: Tensor, heads: int, size: int) -> Tensor:
    """Return the heads of each rank: (rank, n, rows, its heads, d)."""
    if heads % size:  # several ranks need one head
        x = x.repeat_interleave(size // heads, 1)
    return x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4)


def _all_heads(x: Tensor, heads: int) -> Tensor:
    """Put all heads of this rank's positions together: the adjoint of `_by_rank`."""
    x = x.permute(2, 1, 0, 3, 4).flatten(2, 3)
    if x.shape[2] != heads:
        x = x.unflatten(2, (heads, -1)).sum(3)
    return x.transpose(1, 2)


class _HeadExchange(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - a node, which has no public type
        way: _Way,
        heads: tuple[int, ...],
        back: bool,
        direction: str,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.given = way, heads, not back
        return tuple(x.detach() for x in way.moved(tensors, heads, direction, back=back))

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        # A node of its own, so that a backward can be differentiated again.
        return None, None, None, None, *_HeadExchange.apply(*ctx.given, "backward", *grads)
