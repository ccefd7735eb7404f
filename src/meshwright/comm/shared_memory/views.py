"""Tensors over stretches of memory, outside autograd."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of", "flat", "over"]


def over(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over ``numel`` elements at ``address``, outside autograd."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one dimension, outside autograd and without touching its version."""
    if tensor.is_inference() and tensor.numel():
        return over(tensor.data_ptr(), tensor.numel(), tensor.dtype)
    return tensor.data.view(-1)


def bytes_of(flat: torch.Tensor, first: int, nbytes: int) -> torch.Tensor:
    """The elements of ``flat`` that lie in ``nbytes`` bytes from byte ``first``."""
    width = flat.dtype.itemsize
    return flat[first // width : (first + max(0, nbytes)) // width]
