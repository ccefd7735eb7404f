"""Differentiable communication of activations: each backward is the adjoint of its forward.

A local tensor represents a global one in one of three ways: every rank has all of it (Replicate), a
chunk of one dim by `meshwright.layout.chunk` (Shard), or one summand (Partial). The gradient of a
Replicate or Shard tensor has the same placement; the gradient of a Partial one is Replicate.
``total`` is the size of the full dim:

================================  =====================  =================  ====================
function                          from, to               forward            backward
================================  =====================  =================  ====================
``copy_to(x)``                    Replicate, Replicate   none               all-reduce: gradients
                                                                            that come are Partial
``reduce_from(x)``                Partial, Replicate     all-reduce         none
``gather_from(x, dim, total)``    Shard, Replicate       all-gather         slice; reduce-scatter
                                                                            with ``partial=True``
``scatter_to(x, dim)``            Replicate, Shard       slice              all-gather
``reduce_scatter_to(x, dim)``     Partial, Shard         reduce-scatter     all-gather
``exchange(x, dim, to, total)``   Shard, Shard           all-to-all         all-to-all
================================  =====================  =================  ====================

All support double backward. With one rank, nothing is sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from meshwright.comm import Communicator
from meshwright.comm.graphs.functional import (
    is_traced,
    traced_all_gather,
    traced_all_reduce,
    traced_all_to_all,
    traced_reduce_scatter,
)
from meshwright.layout import chunk


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of a module's messages, by the direction of the pass."""

    name: str
    forward: str
    backward: str

    @staticmethod
    def of(name: str) -> Labels:
        """Make the labels of the module called ``name``."""
        return Labels(name, f"{name} forward", f"{name} backward")

    def turned(self) -> Labels:
        """The labels for the double backward: both directions are the backward's."""
        return Labels(self.name, self.backward, self.backward)


def copy_to(x: torch.Tensor, axis: Communicator, labels: Labels) -> torch.Tensor:
    """Return ``x`` for different uses on each rank: its gradients, Partial, are summed."""
    return _apply(x, _same, functools.partial(_sum, axis, labels.backward), axis)


def reduce_from(
    x: torch.Tensor, axis: Communicator, labels: Labels, *, complete: bool = False
) -> torch.Tensor:
    """Compute the sum of every rank's ``x``, on every rank.

    ``complete``: in a double backward the gradients that come back are full sums, as with DTensors,
    and not summands.
    """
    there = functools.partial(_sum, axis, labels.forward)
    return _apply(x, there, _same, axis, _same if complete else None)


def gather_from(
    x: torch.Tensor,
    axis: Communicator,
    labels: Labels,
    *,
    dim: int,
    total: int,
    partial: bool = False,
) -> torch.Tensor:
    """Gather the full tensor, ``total`` rows along ``dim``, from every rank's chunk.

    ``partial``: each rank uses the full tensor for another part of the result, so the backward sums
    the gradients.
    """
    back = (
        functools.partial(_sum_part, axis, labels.backward, dim)
        if partial
        else functools.partial(_slice, axis, dim)
    )
    return _apply(x, functools.partial(_gather, axis, labels.forward, dim, total), back, axis)


def scatter_to(x: torch.Tensor, axis: Communicator, labels: Labels, *, dim: int) -> torch.Tensor:
    """Return this rank's chunk along ``dim`` of a replicated ``x``."""
    back = functools.partial(_gather, axis, labels.backward, dim, x.shape[dim])
    return _apply(x, functools.partial(_slice, axis, dim), back, axis)


def reduce_scatter_to(
    x: torch.Tensor, axis: Communicator, labels: Labels, *, dim: int, complete: bool = False
) -> torch.Tensor:
    """Compute this rank's chunk along ``dim`` of the sum of every rank's ``x``.

    ``complete`` as in `reduce_from`.
    """
    back = functools.partial(_gather, axis, labels.backward, dim, x.shape[dim])
    there = functools.partial(_sum_part, axis, labels.forward, dim)
    return _apply(x, there, back, axis, functools.partial(_slice, axis, dim) if complete else None)


def exchange(
    x: torch.Tensor, axis: Communicator, labels: Labels, *, dim: int, to: int, total: int
) -> torch.Tensor:
    """Convert chunks along ``dim``, of ``total`` rows together, to chunks along dim ``to``."""
    there = functools.partial(_exchange, axis, labels.forward, dim, to, total)
    return _apply(
        x, there, functools.partial(_exchange, axis, labels.backward, to, dim, x.shape[to]), axis
    )


# ------------------------------------------------------------------- without autograd


def own_part(x: torch.Tensor, axis: Communicator, dim: int) -> torch.Tensor:
    """Return a view of this rank's chunk of ``x`` along ``dim``."""
    start, length = chunk(x.shape[dim], axis.size, axis.rank)
    return x.narrow(dim, start, length)


def gathered(x: torch.Tensor, axis: Communicator, label: str, dim: int, total: int) -> torch.Tensor:
    """Gather all ranks' chunks ``x`` along ``dim``, of ``total`` rows together."""
    if axis.is_alone:
        return x
    rows = -(-total // axis.size)
    _check_chunk(x, axis, label, dim, total)
    if x.shape[dim] != rows:
        shape = list(x.shape)
        shape[dim] = rows - x.shape[dim]
        x = torch.cat([x, x.new_zeros(shape)], dim)
    dim %= x.ndim
    if is_traced(x):
        everyone = traced_all_gather(x, axis).view(axis.size, *x.shape)
    else:
        everyone = x.new_empty((axis.size, *x.shape))
        with axis.functional():
            axis.all_gather(everyone, x.contiguous(), label=label).wait()
    if dim:
        everyone = everyone.movedim(0, dim)
    whole = everyone.reshape((*x.shape[:dim], axis.size * rows, *x.shape[dim + 1 :]))
    return whole if total == axis.size * rows else whole.narrow(dim, 0, total).contiguous()


def start_sum(x: torch.Tensor, axis: Communicator, label: str) -> Callable[[], torch.Tensor]:
    """Start to sum contiguous ``x`` in place; returns a function that waits for the sum."""
    if axis.is_alone:
        return lambda: x
    if is_traced(x):
        total = traced_all_reduce(x, axis)
        return lambda: total
    with axis.functional():
        pending = axis.all_reduce(x, label=label)

    def wait() -> torch.Tensor:
        pending.wait()
        return x

    return wait


def start_sum_part(
    x: torch.Tensor, axis: Communicator, label: str, dim: int
) -> Callable[[], torch.Tensor]:
    """Start to sum ``x``; returns a function that waits for this rank's chunk along ``dim``."""
    size, total = axis.size, x.shape[dim]
    if axis.is_alone:
        return lambda: x
    dim %= x.ndim
    rows = -(-total // size)
    if total != rows * size:
        shape = list(x.shape)
        shape[dim] = rows * size - total
        x = torch.cat([x, x.new_zeros(shape)], dim)
    send = x.unflatten(dim, (size, rows))
    if dim:
        send = send.movedim(dim, 0)
    send = send.contiguous()
    length = chunk(total, size, axis.rank)[1]
    if is_traced(x):
        part = traced_reduce_scatter(send.flatten(0, 1), axis).narrow(dim, 0, length)
        return lambda: part
    own = x.new_empty(send.shape[1:])
    with axis.functional():
        pending = axis.reduce_scatter(own, send, label=label)

    def wait() -> torch.Tensor:
        pending.wait()
        return own if length == rows else own.narrow(dim, 0, length).contiguous()

    return wait


def _check_chunk(x: torch.Tensor, axis: Communicator, label: str, dim: int, total: int) -> None:
    length = chunk(total, axis.size, axis.rank)[1]
    if x.shape[dim] != length:
        raise ValueError(
            f"{label}: expected rank {axis.rank} of {axis.size} on axis {axis.axis} to hold "
            f"{length} of {total} rows along dim {dim}, found shape {tuple(x.shape)}"
        )


def _same(x: torch.Tensor) -> torch.Tensor:
    # Another object: a node's output must not be its input.
    return x.view_as(x)


def _sum(axis: Communicator, label: str, x: torch.Tensor) -> torch.Tensor:
    # A copy: it is summed in place, and ``x`` belongs to the caller.
    return start_sum(x.clone(memory_format=torch.contiguous_format), axis, label)()


def _gather(axis: Communicator, label: str, dim: int, total: int, x: torch.Tensor) -> torch.Tensor:
    # Detached: autograd rejects in-place writes to views made inside a Function.
    return gathered(x, axis, label, dim, total).detach()


def _slice(axis: Communicator, dim: int, x: torch.Tensor) -> torch.Tensor:
    # A copy, so that the rest of ``x`` can be freed.
    return own_part(x, axis, dim).clone(memory_format=torch.contiguous_format)


def _sum_part(axis: Communicator, label: str, dim: int, x: torch.Tensor) -> torch.Tensor:
    return start_sum_part(x, axis, label, dim)().detach()


def _exchange(
    axis: Communicator, label: str, dim: int, to: int, total: int, x: torch.Tensor
) -> torch.Tensor:
    _check_chunk(x, axis, label, dim, total)
    mine = x.shape[to]
    to_go, to_come = _lengths(axis, mine), _lengths(axis, total)
    rest = math.prod(size for each, size in enumerate(x.shape) if each not in (dim, to))
    send = torch.cat([part.reshape(-1) for part in x.split(to_go, to)])
    sizes = [n * to_go[axis.rank] * rest for n in to_come]
    going = [n * x.shape[dim] * rest for n in to_go]
    if is_traced(x):
        received = traced_all_to_all(send, axis, sizes, going)
    else:
        received = x.new_empty(sum(to_come) * to_go[axis.rank] * rest)
        with axis.functional():
            axis.all_to_all(
                received, send, output_splits=sizes, input_splits=going, label=label
            ).wait()
    shape = list(x.shape)
    shape[to] = to_go[axis.rank]
    parts = []
    for part, length in zip(received.split(sizes), to_come, strict=True):
        shape[dim] = length
        parts.append(part.view(shape))
    return torch.cat(parts, dim)


def _lengths(axis: Communicator, total: int) -> list[int]:
    return [chunk(total, axis.size, rank)[1] for rank in range(axis.size)]


_Operation = Callable[[torch.Tensor], torch.Tensor]


class _Adjoints(torch.autograd.Function):
    """An autograd node: ``there`` forward, ``back`` backward, ``again`` in double backward."""

    # The compiler reads these signatures, so they cannot be autograd's general ones.
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, x: torch.Tensor, there: _Operation, back: _Operation, again: _Operation
    ) -> torch.Tensor:
        ctx.operations = back, again  # pyrefly: ignore[missing-attribute]
        return there(x)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        back, again = ctx.operations  # pyrefly: ignore[missing-attribute]
        # A node of its own, so that a backward can be differentiated again.
        return _Adjoints.apply(grad, back, again, back), None, None, None


def _apply(
    x: torch.Tensor,
    there: _Operation,
    back: _Operation,
    axis: Communicator,
    again: _Operation | None = None,
) -> torch.Tensor:
    return x if axis.is_alone else _Adjoints.apply(x, there, back, again or there)
