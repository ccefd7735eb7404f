"""The operators that stand for gradient reductions in a traced graph, until a pass fuses them.

==================  ==============================================================================
``grad_reduce``     the mean of one gradient over the ranks of a group. It carries all that a
                    bucket's plan depends on, so equal graphs have equal plans, also from caches
``with_kept``       a gradient plus what passes without a reduction have left in ``.grad``
``deliver``         adds to the gradient of a DTensor parameter, in a compiled backward
``stays``           notes that a gradient of a compiled backward is not reduced in this pass
``divided``         a large gradient over the number of ranks, in memory that the model keeps
``agree``           checks, before a graph's first reduction, that all ranks run the same graph
==================  ==============================================================================

The operators find the marked model of this process by its name, see `announce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.comm.graphs.untraced import apart
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import InternalError
from meshwright.torch_internals.distributed import graph_operators


class MarkedModel(Protocol):
    """A model whose gradients are marked in graphs."""

    def take_kept(self, index: int) -> torch.Tensor | None:
        """Take from ``.grad`` what passes without a reduction have left for parameter ``index``."""

    def deliver(self, index: int, gradient: torch.Tensor) -> None:
        """Add this rank's part of a gradient to ``.grad`` of parameter ``index``, a DTensor."""

    def stays_local(self, index: int) -> None:
        """Note that the gradient of parameter ``index`` stays on this rank."""

    def divided(self, index: int, gradient: torch.Tensor, ranks: int) -> torch.Tensor:
        """Divide ``gradient`` of parameter ``index`` by ``ranks``, in contiguous, kept memory."""

    def agree(self, indices: Sequence[int], plan: str) -> None:
        """Check across ranks that all reduce the gradients of ``indices``, by the same ``plan``.

        Raises on every rank when another one is about to do something else.
        """

    def unfused(self) -> None:
        """Count a mark that runs unfused: no pass has put it into a bucket."""


def announce(name: str, model: MarkedModel) -> None:
    """Register ``model`` for the operators, for as long as the model is alive."""
    PROCESS.marked[name] = model


for _name, _arguments in (
    (
        "grad_reduce",
        "(Tensor gradient, int index, int ranks, str group, str model, str mode, int[] sizes)"
        " -> Tensor",
    ),
    ("with_kept", "(Tensor gradient, int index, str model) -> Tensor"),
    ("divided", "(Tensor gradient, int index, int ranks, str model) -> Tensor"),
    # Nothing is written to the first: operators without a result are kept where they seem to write.
    ("deliver", "(Tensor(a!) token, Tensor gradient, int index, str model) -> ()"),
    ("stays", "(Tensor(a!) token, int index, str model) -> ()"),
    ("agree", "(Tensor(a!) anchor, int[] indices, str model, str plan) -> ()"),
):
    # What they do on the host has to happen in each step: a CUDA graph would leave it out.
    torch.library.define(f"meshwright::{_name}", _arguments, tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl("meshwright::grad_reduce", "CompositeExplicitAutograd")
@apart
def _grad_reduce(
    gradient: torch.Tensor,
    index: int,
    ranks: int,
    group: str,
    model: str,
    mode: str,
    sizes: Sequence[int],
) -> torch.Tensor:
    _find(model).unfused()
    return WAIT(ALL_REDUCE(gradient / ranks, "sum", group))


@torch.library.register_fake("meshwright::grad_reduce")
@torch.library.register_fake("meshwright::with_kept")
def _alike(gradient: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(gradient)


@torch.library.impl("meshwright::with_kept", "CompositeExplicitAutograd")
@apart
def _with_kept(gradient: torch.Tensor, index: int, model: str) -> torch.Tensor:
    kept = _find(model).take_kept(index)
    # A copy: by its schema the operator returns memory of its own.
    return gradient.clone() if kept is None else gradient + kept


@torch.library.impl("meshwright::deliver", "CompositeExplicitAutograd")
@apart
def _deliver(token: torch.Tensor, gradient: torch.Tensor, index: int, model: str) -> None:
    # A copy: the graph may use the memory of its gradient for another value after this.
    _find(model).deliver(index, gradient.clone())


@torch.library.impl("meshwright::stays", "CompositeExplicitAutograd")
@apart
def _stays(token: torch.Tensor, index: int, model: str) -> None:
    _find(model).stays_local(index)


@torch.library.register_fake("meshwright::deliver")
@torch.library.register_fake("meshwright::stays")
@torch.library.register_fake("meshwright::agree")
def _nothing(*_: object) -> None:
    return None


@torch.library.impl("meshwright::divided", "CompositeExplicitAutograd")
@apart
def _divided(gradient: torch.Tensor, index: int, ranks: int, model: str) -> torch.Tensor:
    found: torch.Tensor = _find(model).divided(index, gradient, ranks)
    return found


@torch.library.register_fake("meshwright::divided")
def _contiguous(gradient: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


@torch.library.impl("meshwright::agree", "CompositeExplicitAutograd")
@apart
def _agree(anchor: torch.Tensor, indices: Sequence[int], model: str, plan: str) -> None:
    _find(model).agree(indices, plan)


GRAD_REDUCE = torch.ops.meshwright.grad_reduce.default
AGREE = torch.ops.meshwright.agree.default
DIVIDED = torch.ops.meshwright.divided.default

with_kept = torch.ops.meshwright.with_kept.default
"""``gradient`` plus what ``.grad`` of parameter ``index`` of ``model`` holds when the graph runs,
which it takes."""
deliver = torch.ops.meshwright.deliver.default
"""Adds ``gradient`` to that of parameter ``index`` of ``model``, a DTensor, when the graph runs.
``token`` is an input of the graph, the same for all of a model's gradients."""
stays = torch.ops.meshwright.stays.default
"""Notes, when the graph runs, that the gradient of parameter ``index`` of ``model`` stays here.
``token`` is as that of `deliver`."""

# What the compiler's passes emit and look for: c10d's operators that graphs may hold.
ALL_REDUCE = graph_operators.all_reduce.default
ALL_REDUCE_IN_PLACE = graph_operators.all_reduce_.default
ALL_REDUCE_COALESCED = graph_operators.all_reduce_coalesced.default
WAIT = graph_operators.wait_tensor.default


def grad_reduce(
    gradient: torch.Tensor,
    *,
    index: int,
    ranks: int,
    group: str,
    model: str,
    mode: str,
    sizes: Sequence[int],
) -> torch.Tensor:
    """Compute the mean of ``gradient`` over ``ranks`` ranks of ``group``, same shape and dtype.

    ``index`` is the parameter's index in ``model``; buckets hold descending ones. ``mode`` is
    ``"coalesced"``, ``"shared"`` (the same, with large gradients in memory that ranks of a host
    share) or ``"concat"``; ``sizes`` are the bytes that close the buckets one by one, the last for
    all that follow.
    """
    return GRAD_REDUCE(gradient, index, ranks, group, model, mode, sizes)


def _find(name: str) -> MarkedModel:
    model = PROCESS.marked.get(name)
    if model is None:
        raise InternalError(f"a graph reduces gradients of model {name}, which is gone")
    return model
