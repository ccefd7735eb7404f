"""Hooks that users have put on parameters which are sharded: they run when gradients are there.

Autograd never sees a sharded parameter: it sees the whole one, whose gradient is of one rank. So
what was registered on the parameter runs here, once for each mean that is delivered. That is also
what the hook of one process would see, where `Tensor.register_hook` on a replica sees the
gradient of its own rank alone.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.comm.dtensor import local_of

__all__ = ["carry_hooks", "change_by_hooks", "has_hooks", "run_after_hooks"]


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether anything waits for the gradient of ``parameter``."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target``, which takes the place of ``source``, have its hooks; handles remove both."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def change_by_hooks(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Give ``gradient`` to the hooks of ``parameter``; what they return is written to it."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
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


def run_after_hooks(parameter: nn.Parameter) -> None:
    """Call what was to be called when ``parameter.grad`` is there."""
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
