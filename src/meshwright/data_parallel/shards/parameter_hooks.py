"""Hooks that users have registered on sharded parameters: they run when gradients are reduced.

Autograd never sees a sharded parameter: it sees the full one, whose gradient is of one rank. So
what was registered on the parameter runs here, once for each mean that is delivered. The hook of a
single process sees the same; `Tensor.register_hook` on a replica sees the gradient of its own rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import (
    carry_after_hooks,
    has_after_hooks,
)
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.errors import InternalError
from meshwright.torch_internals.autograd import backward_hooks_of, set_backward_hooks


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` has hooks of either kind."""
    return bool(backward_hooks_of(parameter)) or has_after_hooks(parameter)


def carry_hooks(source: torch.Tensor, target: nn.Parameter, name: str) -> None:
    """Give ``target``, which takes the place of ``source``, its hooks; handles remove both."""
    if backward_hooks_of(source):
        set_backward_hooks(target, backward_hooks_of(source))
    carry_after_hooks(source, target, name)


class _Behind(torch.autograd.Function):
    """A node behind leaves. It calls no operator, which would cost DTensors many times as much."""

    @staticmethod
    def forward(ctx: object, *leaves: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        return torch.empty(0, device="cpu")


def accumulators_of(leaves: Sequence[torch.Tensor]) -> list[torch.autograd.graph.Node]:
    """The nodes by which autograd adds to ``.grad`` of ``leaves``, which require grad."""
    with torch.enable_grad():
        behind: torch.Tensor = _Behind.apply(*leaves)
    nodes = () if behind.grad_fn is None else behind.grad_fn.next_functions
    found = [node for node, _ in nodes if node is not None]
    if len(found) != len(leaves):
        raise InternalError(f"{len(leaves)} leaves have {len(found)} nodes behind them")
    return found


def accumulator_of(leaf: torch.Tensor) -> torch.autograd.graph.Node:
    """The node by which autograd adds to ``leaf.grad``; ``leaf`` requires grad."""
    return accumulators_of([leaf])[0]


def change_by_hooks(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Give ``gradient`` to the hooks of ``parameter``; what they return is written to it."""
    for hook in tuple((backward_hooks_of(parameter) or {}).values()):
        try:
            changed = hook(gradient)
            if changed is not None:
                local_of(gradient).copy_(local_of(changed))
        except Exception as error:
            error.add_note(
                f"This was a hook of parameter {name!r}, which is sharded: it was given the mean "
                f"gradient as a {type(gradient).__name__} of shape {tuple(gradient.shape)}."
            )
            raise
