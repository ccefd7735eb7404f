"""Rows of tokens on their way to the ranks of their experts, and back.

::

    this rank                                     the rank of some experts
    tokens (n, D), experts of each (n, K)
      │  at: one row for each (token, rank)
      └── counts ── all-to-all ─────────────────> rows to come, pairs of each expert
      └── rows, weights, experts ── all-to-all ─> rows (m, D) ── Places ──> pairs, by expert
                                                                              │ its experts
    tokens (n, D) <── sum over ranks <── all-to-all ── rows (m, D) <── sum over slots

Spreading rows and summing them are adjoints, with and without an exchange, so one autograd node
does both, in either direction. The experts' own arithmetic lies between two such nodes: it runs
functions of the user's model, which autograd records as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from meshwright.comm import Communicator
from meshwright.comm.streams import is_host
from meshwright.layout import chunk


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of a tensor, some of them several times, each in a slot of its own.

    Row ``at[i] // slots`` of ``rows`` becomes row ``i``. Sums run over the slots in their order, so
    they have one order on every run and device.
    """

    at: torch.Tensor
    rows: int
    slots: int

    def spread(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Take the rows of each tensor."""
        source = self.at if self.slots == 1 else self.at // self.slots
        return [x.index_select(0, source) for x in tensors]

    def summed(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Add up what became of each row."""
        order = self.at.argsort()
        if self.slots == 1:  # a permutation
            return [x.index_select(0, order) for x in tensors]
        found: list[torch.Tensor] = []
        for x in tensors:
            if is_host(x.device) and x.element_size() > 2:  # one row after the other
                at = self.at
                if self.slots > 2:  # of two, the order does not matter
                    at, x = at.index_select(0, order), x.index_select(0, order)
                total = x.new_zeros((self.rows, *x.shape[1:]))
                # Of columns of something wider it would add up each number by itself.
                found.append(total.index_add_(0, at // self.slots, x.contiguous()))
                continue
            every = x.new_zeros((self.rows * self.slots, *x.shape[1:]))
            every.index_copy_(0, self.at, x)
            found.append(every.unflatten(0, (self.rows, self.slots)).sum(1))
        return found


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Route:
    """The way of one forward's tokens, and of their gradients."""

    axis: Communicator
    name: str
    """The name of the module."""
    places: Places
    """One slot for each rank that has some of a token's experts."""
    going: list[int]
    """How many rows this rank sends to each rank."""
    coming: list[int]
    counts: list[int]
    """How many of this rank's tokens go to each expert."""
    here: list[int]
    """How many pairs of a token and an expert each expert of this rank has, from all ranks."""
    ends: torch.Tensor
    """Where each expert's pairs end, on the device."""
    indices: torch.Tensor

    def spread(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Send each token to the ranks of its experts, all tensors in one message."""
        rows = self.places.spread(tensors, label)
        return self._exchanged(rows, self.going, self.coming, label)

    def summed(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Send rows back, and add up those of a token in the order of the ranks."""
        rows = self._exchanged(tensors, self.coming, self.going, label)
        return self.places.summed(rows, label)

    def _exchanged(
        self, tensors: Sequence[torch.Tensor], going: list[int], coming: list[int], label: str
    ) -> list[torch.Tensor]:
        if len(tensors) == 1:
            return [exchanged(tensors[0].contiguous(), self.axis, going, coming, label)]
        # What is beside the first tensor travels as further columns of it, which stay where they
        # arrive: rows are large.
        first, *beside = tensors
        parts = [x.contiguous().view(torch.uint8) for x in beside]
        widths = [part.shape[1] for part in parts]
        rest = -sum(widths) % first.element_size()
        columns = torch.cat([*parts, parts[0].new_zeros((len(first), rest))], 1).view(first.dtype)
        found = exchanged(torch.cat([first, columns], 1), self.axis, going, coming, label)
        rows, columns = found.tensor_split([first.shape[1]], 1)
        arrived = columns.contiguous().view(torch.uint8).split([*widths, rest], 1)
        pairs = zip(beside, arrived, strict=False)
        return [rows, *(column.contiguous().view(x.dtype) for x, column in pairs)]


def exchanged(
    x: torch.Tensor, axis: Communicator, going: list[int], coming: list[int], label: str
) -> torch.Tensor:
    """Send rows of ``x``, ``going`` to each rank; ``coming`` ones arrive. Empty ranks take part."""
    if axis.is_alone:
        return x
    found = x.new_empty((sum(coming), *x.shape[1:]))
    if axis.is_rehearsed:  # the others send what this rank sends itself
        mine = x.split(going)[axis.rank]
        if len(mine):
            rows = torch.arange(len(found), device=x.device) % len(mine)
            torch.index_select(mine, 0, rows, out=found)
        return found
    axis.all_to_all(found, x, output_splits=coming, input_splits=going, label=label).wait()
    return found


@torch.no_grad()
def plan_route(indices: torch.Tensor, experts: int, axis: Communicator, name: str) -> Route:
    """Make the route of tokens whose experts are ``indices`` (n, K), of ``experts`` in all.

    Sends counts to each rank. On a device, the host reads them here, and nothing else.

    Raises ValueError for an index that names no expert.
    """
    n, k = indices.shape
    size = axis.size
    each = -(-experts // size)  # chunks, as DTensors have them
    slots = min(k, size)
    if axis.is_rehearsed:  # what a router reads is wrong: here all experts get as many tokens
        indices = torch.arange(n * k, device=indices.device).view(n, k) % experts
    given = indices.long()
    known = given.clamp(0, experts - 1)
    outside = (given != known).sum().view(1)
    by_expert = given.new_zeros(size * each)
    by_expert.scatter_add_(0, known.flatten(), torch.ones_like(given).flatten())
    # A token's ranks, each once: in the order of ranks, so that its slots are, too.
    ranks = (known // each).sort(1).values
    is_first = torch.ones_like(ranks, dtype=torch.bool)
    is_first[:, 1:] = ranks[:, 1:] != ranks[:, :-1]
    target = ranks.where(is_first, size).flatten()
    to_rank = given.new_zeros(size + 1)
    to_rank.scatter_add_(0, target, torch.ones_like(target))
    sent = torch.cat([by_expert.view(size, each), to_rank[:size].unsqueeze(1)], 1)
    ones = [1] * size
    got = exchanged(sent, axis, ones, ones, f"{name} counts")
    bad, *numbers = torch.cat([outside, sent.flatten(), got.flatten()]).tolist()
    if bad:
        raise ValueError(
            f"axis {axis.axis}: '{name}' got experts from {int(given.min())} to {int(given.max())} "
            f"on rank {axis.rank}, expected 0 to {experts - 1}. If they mark tokens of other ranks "
            "(Hugging Face's own expert parallelism), load the model without it"
        )
    half, row = size * (each + 1), each + 1
    mine, theirs = numbers[:half], numbers[half:]
    going, coming = mine[each::row], theirs[each::row]
    # Stable: in the order of ranks, then of tokens, which is that of the global batch.
    order = target.sort(stable=True).indices[: sum(going)]
    slot = (is_first.cumsum(1) - 1).flatten().index_select(0, order)
    at = order.div(k, rounding_mode="floor") * slots + slot
    of_experts = got[:, : chunk(experts, size, axis.rank)[1]].sum(0)
    return Route(
        axis=axis,
        name=name,
        places=Places(at, n, slots),
        going=going,
        coming=coming,
        counts=[mine[e // each * row + e % each] for e in range(experts)],
        here=[sum(theirs[e::row]) for e in range(len(of_experts))],
        ends=of_experts.cumsum(0, dtype=torch.int32),
        indices=indices,
    )


@torch.no_grad()
def pairs_of(route: Route, slots: torch.Tensor, experts: int) -> tuple[Places, torch.Tensor]:
    """Sort the pairs of this rank's experts in ``slots`` (m, K), rows that have arrived.

    Returns their places, and the expert of each, counted from the first of this rank.
    """
    start, length = chunk(experts, route.axis.size, route.axis.rank)
    local = slots.long().flatten() - start
    local = local.where((local >= 0) & (local < length), length)
    found = local.sort(stable=True)
    count = sum(route.here)
    return Places(found.indices[:count], *slots.shape), found.values[:count]


def moved(
    way: Route | Places,
    tensors: Sequence[torch.Tensor],
    *,
    back: bool,
    guard: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Spread rows of ``tensors`` along ``way``, or sum them ``back``; differentiable.

    A backward pass calls ``guard`` first. Tensors of integers go there only.
    """
    return cast("tuple[torch.Tensor, ...]", _Travel.apply(way, back, False, guard, *tensors))


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401 - a node, which has no public type
        way: Route | Places,
        back: bool,
        is_backward: bool,
        guard: Callable[[], None] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        label = ""
        if isinstance(way, Route):
            kind = "combine" if back != is_backward else "dispatch"
            label = f"{way.name} {kind} {'backward' if is_backward else 'forward'}"
        found = way.summed(tensors, label) if back else way.spread(tensors, label)
        ctx.way, ctx.back, ctx.guard = way, back, guard
        ctx.is_number = [x.is_floating_point() for x in tensors]
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        # Saved on every rank alike: recomputation stops after the last tensor that a block has
        # saved, and a rank without tokens has to come as far as the others.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(found)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.guard is not None:
            ctx.guard()
        given = [grad for grad, is_number in zip(grads, ctx.is_number, strict=True) if is_number]
        found = iter(_Travel.apply(ctx.way, not ctx.back, True, None, *given))
        returned = [next(found) if is_number else None for is_number in ctx.is_number]
        return None, None, None, None, *returned
