"""Tensor subclasses: which ones handle operators themselves, and where their values are.

A subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` defines how it is gathered. It
is a tensor with its own memory, or a wrapper around one plain tensor of its shape and dtype.
"""

from __future__ import annotations

import torch

from meshwright.torch_internals.distributed import AsyncCollectiveTensor

PROTOCOL = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_protocol(tensor: torch.Tensor) -> bool:
    """Check whether a subclass defines how it is gathered, by one or both methods."""
    return any(hasattr(type(tensor), name) for name in PROTOCOL)


def dispatches(tensor: torch.Tensor) -> bool:
    """Check whether a subclass handles its operators itself."""
    if isinstance(tensor, AsyncCollectiveTensor):  # a plain one, to be waited for
        return False
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_calls(tensor: torch.Tensor) -> bool:
    """Check whether a user's subclass handles its functions or operators itself."""
    names = ("__torch_function__", "__torch_dispatch__")
    owners = (next(c for c in type(tensor).__mro__ if name in vars(c)) for name in names)
    return any(
        owner.__module__.partition(".")[0] not in ("torch", "meshwright") for owner in owners
    )


def holder_of(tensor: torch.Tensor) -> str | None:
    """Return the attribute of a wrapper that holds its values; None for other tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = list(vars(tensor)) if flatten is None else flatten()[0]
    inner = [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]
    if len(inner) != 1:
        return None
    held = getattr(tensor, inner[0])
    is_alike = held.shape == tensor.shape and held.dtype == tensor.dtype
    return inner[0] if is_alike and type(held) in (torch.Tensor, torch.nn.Parameter) else None


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values, a plain tensor on the same memory, of a subclass with all-gather methods.

    Any other tensor is returned unchanged.
    """
    if type(tensor) is torch.Tensor or not has_protocol(tensor):
        return tensor
    holder = holder_of(tensor)
    if holder is not None:
        held = getattr(tensor, holder)
        return held.detach() if isinstance(held, torch.nn.Parameter) else held
    return tensor if dispatches(tensor) else tensor.as_subclass(torch.Tensor)
