"""Faster algorithms for Gloo, made of Gloo's own operations, chosen by size.

Gloo's reduce-scatter sends the whole tensor through an all-reduce, its all-gather passes every
block around a ring, and its all-reduce does both. Two ranks need no ring: each sends the other
what that is owed, in one all-to-all, and sums for itself. CPU time of one process of two over
loopback, in milliseconds:

=====================  ============  ===================  ==============
size of the whole      Gloo's own    from one all-to-all  two broadcasts
=====================  ============  ===================  ==============
all-gather, 4 KB       0.29          0.17                 0.36
all-gather, 256 KB     0.33          0.15                 0.34
all-gather, 1 MB       0.89          0.30                 0.48
all-gather, 8 MB       3.2           1.9                  1.6
all-reduce, 4 KB       0.43          0.16
all-reduce, 256 KB     0.62          0.34
all-reduce, 1 MB       1.3           0.82
all-reduce, 8 MB       5.6           4.6
all-reduce, 32 MB      23            28
=====================  ============  ===================  ==============

Among more ranks (wall time, medians):

=================  ===============  =========================  ==========  ============
size, processes    reduce_scatter   all_to_all + local sum     all_gather  n broadcasts
=================  ===============  =========================  ==========  ============
32 MB, 2           80.5             21.8                       53.1        19.8
32 MB, 4           194.8            46.2                       126.0       40.3
=================  ===============  =========================  ==========  ============

There all-to-all sends every share, the own one too, since it takes one stretch of memory. A local
sum runs in rank order, in float32 for half-precision tensors, so that the result does not depend
on who arrived first.

Gloo sees no difference between swaps: where one of two ranks reduces and the other gathers as many
bytes, both end, with wrong values. Shared memory names both; strategies compare what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.comm import lookup

if TYPE_CHECKING:
    from meshwright.comm.pending import Work

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

BROADCASTS_FROM = 64 * 1024
"""Bytes of the gathered tensor from which concurrent broadcasts beat the ring."""
GATHERED_IN_SWAPS = 4 * 2**20
"""Bytes of the gathered tensor up to which one all-to-all of two ranks beats two broadcasts."""
REDUCED_IN_SWAPS = 8 * 2**20
"""Bytes up to which two ranks swap whole tensors to sum them."""

_HALF = (torch.float16, torch.bfloat16)


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]
) -> list[Work] | None:
    """Gather equal shares into ``output``, rank-major; None when Gloo's own gather is better.

    ``output`` is contiguous and holds ``len(ranks)`` times the elements of ``tensor``, which may be
    this rank's own part of ``output``.
    """
    size = output.numel() * output.element_size()
    swaps = len(ranks) == 2 and size <= GATHERED_IN_SWAPS
    if len(ranks) == 1 or not (swaps or size >= BROADCASTS_FROM) or not tensor.numel():
        return None
    rank = dist.get_rank(group)
    parts = output.view(-1).chunk(len(ranks))
    mine = parts[rank]
    if mine.data_ptr() != tensor.data_ptr():
        mine.copy_(tensor.view(-1))
    if swaps:
        return [_swap(parts[1 - rank], mine, rank, group)]
    broadcast = lookup.current("broadcast")
    return [
        broadcast(part, src=source, group=group, async_op=True)
        for part, source in zip(parts, ranks, strict=True)
    ]


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, reduction: str
) -> tuple[list[Work], Callable[[], None]] | None:
    """Swap whole tensors and sum them here in rank order; None where Gloo's own way is better.

    Returns the work and the local sum into ``tensor``, to run when it is done.
    """
    size = tensor.numel() * tensor.element_size()
    if reduction != "sum" or dist.get_world_size(group) != 2 or not 0 < size <= REDUCED_IN_SWAPS:
        return None
    rank = dist.get_rank(group)
    line = tensor.view(-1)
    received = torch.empty_like(line)
    shares = [line, received] if rank == 0 else [received, line]
    return [_swap(received, line, rank, group)], partial(_sum_in_rank_order, line, shares)


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, reduction: str
) -> tuple[list[Work], Callable[[], None]] | None:
    """Exchange the shares and sum them here in rank order; None for what is not a sum.

    ``tensor`` holds ``size`` equal shares, rank-major; this rank's sum goes to ``output``.
    Returns the works and the local sum, to run when they are done.
    """
    size = dist.get_world_size(group)
    if reduction != "sum" or size == 1:
        return None
    parts = tensor.view(size, -1)
    if size == 2:
        # What the other rank is owed is one stretch of memory: the own share stays where it is.
        rank = dist.get_rank(group)
        received = torch.empty_like(parts[0])
        shares = [parts[0], received] if rank == 0 else [received, parts[1]]
        work = _swap(received, parts[1 - rank], rank, group)
    else:
        received = torch.empty_like(parts)
        shares = list(received)
        work = lookup.all_to_all(received.view(-1), tensor.view(-1), group)
    return [work], partial(_sum_in_rank_order, output.view(-1), shares)


def _swap(received: torch.Tensor, sent: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Work:
    """Send the other one of two ranks a line, and receive one of that length."""
    if not (sent.is_floating_point() or sent.dtype == torch.int64):
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    splits = [0, sent.numel()] if rank == 0 else [sent.numel(), 0]
    return lookup.all_to_all(received, sent, group, splits)


def _sum_in_rank_order(output: torch.Tensor, shares: Sequence[torch.Tensor]) -> None:
    """Write the sum of ``shares`` to ``output``, which may be one of them."""
    total = output
    if output.dtype in _HALF:
        # Adding two half-precision shares would round before it widens.
        total = shares[0].to(torch.float32).add_(shares[1])
    else:
        torch.add(shares[0], shares[1], out=total)
    for share in shares[2:]:
        total.add_(share)
    if total is not output:
        output.copy_(total)
