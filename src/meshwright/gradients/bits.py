"""Bits of tensors, as the integers that they stand for, on the device that they lie on."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import torch
from torch.optim import Optimizer

from meshwright.torch_internals.modules import step_unless, steps_by_flag
from meshwright.torch_internals.tensors import foreach_mul_

_WORDS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integers by their bytes."""

CHUNK = 1 << 24
"""Elements that are taken at once, each as several integers of 8 bytes."""

_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Odd numbers without a pattern."""


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_WORDS[real.element_size()])


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute an integer of the bits of a dense ``tensor``, 1-D int64, where it lies.

    It depends on each element and its place: equal for equal bits, and for others by chance alone.
    """
    words = _as_words(tensor.detach().resolve_conj().resolve_neg().contiguous()).view(-1)
    sums: list[torch.Tensor] = []
    for start in range(0, max(words.numel(), 1), CHUNK):
        part = words[start : start + CHUNK]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=words.device)
        mixed = places.mul_(_PLACE).bitwise_xor_(part.to(torch.int64)).mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 29)
        sums.append(mixed.sum())
    return torch.stack(sums).sum().view(1)


def step_if(is_good: torch.Tensor, optimizer: Optimizer, gradients: Iterable[torch.Tensor]) -> None:
    """Step with ``gradients`` if that ``is_good``, a tensor that the host does not read.

    Else fused optimizers write nothing, and others step with gradients of zero.
    """
    if steps_by_flag(optimizer):
        step_unless(is_good.logical_not().float(), optimizer)
    else:
        zero_unless(is_good, gradients)
        optimizer.step()


@torch.no_grad()
def zero_unless(is_wanted: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Zero all of ``tensors``, in place, unless ``is_wanted``, which the host does not read.

    Their bits are multiplied by one or zero, so that a value that is not finite becomes zero, too.
    """
    words: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        each = _as_words(tensor)
        words.setdefault(each.dtype, []).append(each)
    for kind, group in words.items():
        foreach_mul_(group, is_wanted.to(kind))
