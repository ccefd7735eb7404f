"""Gradients of which tensor-parallel ranks hold parts of a sum, once data axes have been summed.

Chunks lie alike on all ranks of such an axis, so means are summed chunk by chunk, those of all
units in one collective. Packed shards do not, where ranks hold parts of other sizes: there whole
gradients are summed before their reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.comm import Communicator
from meshwright.data_parallel.distributed_parameters import PartialSum
from meshwright.data_parallel.gradient_lines import GradientLine

__all__ = ["Summand", "sum_parts", "summands_of"]

Summand = tuple[PartialSum, torch.Tensor]
"""A gradient, or a part of one, and over what it is to be summed."""


def summands_of(sums: Sequence[tuple[int, PartialSum]], line: GradientLine) -> list[Summand]:
    """The whole gradients in ``line`` of the tensors that ``sums`` name by their index."""
    parts = line.parts()
    return [(add, part) for index, add in sums for part in parts[index]]


@torch.no_grad()
def sum_parts(summands: Iterable[Summand]) -> None:
    """Sum in place: one all-reduce for each axis, dtype and device."""
    together: dict[tuple[Communicator, torch.dtype, torch.device], list[torch.Tensor]] = {}
    for add, part in summands:
        if part.numel():
            key = (add.communicator, part.dtype, part.device)
            together.setdefault(key, []).append(part)
    for (axis, _, _), parts in together.items():
        line = torch.cat([part.reshape(-1) for part in parts]).to(axis.device)
        axis.all_reduce(line, label="partial gradients").wait()
        sums = line.split([part.numel() for part in parts])
        torch._foreach_copy_(
            parts, [each.view(part.shape) for each, part in zip(sums, parts, strict=True)]
        )
