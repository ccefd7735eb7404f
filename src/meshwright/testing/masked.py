"""Microbatches of the size of the whole batch, for comparisons bit by bit.

Kernels may add up in another order for fewer rows, so a model's output for a slice of a batch may
differ in the last bits from the slice of its output. Here each microbatch has all rows, and those
of the others are zero: what a model computes row by row then has the bits of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from meshwright.torch_internals.trees import tree_map, tree_map_only

__all__ = ["masked_microbatches", "unmasked"]


def masked_microbatches(batch: Any, microbatches: int) -> list[Any]:  # noqa: ANN401
    """``batch``, a tensor or nested tensors, as microbatches of its own shapes.

    Microbatch k has the rows (along dim 0) that `torch.tensor_split` gives it, and zeros elsewhere.
    Give them to a schedule that cuts nothing itself (``step_microbatches``), and its stage's
    ``output_chunks`` to `unmasked`.
    """

    def masked(tensor: torch.Tensor, microbatch: int) -> torch.Tensor:
        found = torch.zeros_like(tensor)
        own = torch.tensor_split(found, microbatches)[microbatch]
        own.copy_(torch.tensor_split(tensor, microbatches)[microbatch])
        return found

    return [
        tree_map_only(torch.Tensor, partial(masked, microbatch=k), batch)
        for k in range(microbatches)
    ]


def unmasked(outputs: Sequence[Any]) -> Any:  # noqa: ANN401
    """Find the outputs for the whole batch, of each microbatch its own rows.

    Raises ``ValueError`` for tensors without rows, or whose shapes differ between microbatches.
    """

    def joined(*tensors: Any) -> Any:  # noqa: ANN401
        if not isinstance(tensors[0], torch.Tensor):
            return tensors[0]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1 or not tensors[0].dim():
            raise ValueError(
                f"expected outputs with the rows of the whole batch in every microbatch, found "
                f"shapes {sorted(shapes)}"
            )
        parts = [torch.tensor_split(tensor, len(tensors)) for tensor in tensors]
        return torch.cat([rows[microbatch] for microbatch, rows in enumerate(parts)])

    return tree_map(joined, outputs[0], *outputs[1:])
