"""Tensor subclasses: which compute by calls of their own, and where their values are.

A subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` says how it is gathered. It is
a tensor with memory of its own, or a wrapper around one plain tensor of its shape and dtype.
"""

from __future__ import annotations

import torch

from meshwright.torch_internals.distributed import AsyncCollectiveTensor

PROTOCOL = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_protocol(tensor: torch.Tensor) -> bool:
    """Check for a subclass that says how it is gathered; also where it says one half only."""
    return any(hasattr(type(tensor), name) for name in PROTOCOL)


def dispatches(tensor: torch.Tensor) -> bool:
    """Check for a subclass whose operators are calls of its own."""
    if isinstance(tensor, AsyncCollectiveTensor):  # a plain one, to be waited for
        return False
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_calls(tensor: torch.Tensor) -> bool:
    """Check for a user's subclass whose functions or operators are calls of its own."""
    names = ("__torch_function__", "__torch_dispatch__")
    owners = (next(c for c in type(tensor).__mro__ if name in vars(c)) for name in names)
    return any(
        owner.__module__.partition(".")[0] not in ("torch", "meshwright") for owner in owners
    )


def holder_of(tensor: torch.Tensor) -> str | None:
    """Find the attribute of a wrapper that holds its values; None where it is no such wrapper."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = list(vars(tensor)) if flatten is None else flatten()[0]
    inner = [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]
    if len(inner) != 1:
        return None
    held = getattr(tensor, inner[0])
    is_alike = held.shape == tensor.shape and held.dtype == tensor.dtype
    return inner[0] if is_alike and type(held) in (torch.Tensor, torch.nn.Parameter) else None


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the plain tensor of a subclass that says how it is gathered, or give ``tensor``.

    It is on the same memory.
    """
    if type(tensor) is torch.Tensor or not has_protocol(tensor):
        return tensor
    holder = holder_of(tensor)
    if holder is not None:
        held = getattr(tensor, holder)
        return held.detach() if isinstance(held, torch.nn.Parameter) else held
    return tensor if dispatches(tensor) else tensor.as_subclass(torch.Tensor)
