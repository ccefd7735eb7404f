"""Sums over a rank's elements that add up to those of the full tensor, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.dtensors.gather_dtensor import ShardedPiece
from meshwright.layout import Box

SKETCH = 8
"""Number of signed sums of each tensor."""

_BLOCK = 1 << 16
"""Elements processed at once; each takes about 200 bytes meanwhile."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over some elements of a tensor; those of several parts add up.

    The signs of the signed sums come from each element's index in the full tensor. In the mean
    square, these sums of two tensors differ by as much as the elements do (Alon, Matias and
    Szegedy, The space complexity of approximating the frequency moments, 1999).
    """

    numel: int
    hash: int
    """Sum modulo 2**64 of a hash of each element's bits and index: free of order and layout."""
    square: float
    """Sum of the squares of the finite elements."""
    sketch: tuple[float, ...]
    """`SKETCH` signed sums of the finite elements."""
    nonfinite: int
    """Elements that are infinite or NaN."""

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.sqrt(self.square)

    @staticmethod
    def of(parts: Sequence[Sums]) -> Sums:
        """Add up the parts of a tensor."""
        return Sums(
            numel=sum(part.numel for part in parts),
            hash=sum(part.hash for part in parts) % 2**64,
            square=math.fsum(part.square for part in parts),
            sketch=tuple(math.fsum(part.sketch[i] for part in parts) for i in range(SKETCH)),
            nonfinite=sum(part.nonfinite for part in parts),
        )


@torch.no_grad()
def digest(holding: ShardedPiece) -> Sums:
    """Compute the sums of this rank's elements."""
    flat = holding.tensor.reshape(-1)
    parts: list[Sums] = []
    position = 0
    for box in holding.boxes:
        for start in range(0, box.numel, _BLOCK):
            stop = min(start + _BLOCK, box.numel)
            places = _places(box, holding.global_shape, start, stop, flat.device)
            parts.append(_digest(flat[position + start : position + stop], places))
        position += box.numel
    return Sums.of(parts)


def _digest(flat: Tensor, places: Tensor) -> Sums:
    numel = flat.numel()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        places = (2 * places[:, None] + torch.arange(2, device=places.device)).reshape(-1)
    bits = flat.contiguous().view(_INTEGERS[flat.element_size()]).long()
    mixed = _mix(places)
    values = flat.double()
    is_finite = values.isfinite()
    values = torch.where(is_finite, values, 0.0)
    shifts = torch.arange(SKETCH, device=flat.device)[:, None]
    signs = 1.0 - 2.0 * ((mixed >> shifts) & 1).double()
    numbers = torch.stack([*(signs @ values), values @ values, (~is_finite).sum().double()])
    *sketch, square, nonfinite = numbers.tolist()
    return Sums(
        numel=numel,
        hash=int(_mix(mixed + bits).sum()) % 2**64,
        square=square,
        sketch=tuple(sketch),
        nonfinite=int(nonfinite),
    )


def _places(
    box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> Tensor:
    """Return the flat indices, in the full tensor, of elements ``start`` to ``stop`` of ``box``."""
    left = torch.arange(start, stop, device=device)
    places = torch.zeros_like(left)
    for dim in reversed(range(len(shape))):
        here = left % box.shape[dim] + box.offset[dim]
        places += here * math.prod(shape[dim + 1 :])
        left = left // box.shape[dim]
    return places


def _mix(words: Tensor) -> Tensor:
    """Compute the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift to the right with zeros from the left: torch's own shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
