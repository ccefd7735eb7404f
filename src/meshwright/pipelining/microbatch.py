"""Cutting a batch into microbatches, and putting their outputs together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.errors import PipeliningShapeError

__all__ = ["TensorChunkSpec", "chunk_weights", "merge_chunks", "split_args_kwargs_into_chunks"]


@dataclass(frozen=True)
class TensorChunkSpec:
    """Cut a tensor along ``split_dim``."""

    split_dim: int

    def __str__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut along dim 0."""
    leaves, spec = tree_flatten((args, dict(kwargs or {})))
    rows: list[list[Any]] = [[] for _ in range(chunks)]
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) > 1:
        raise PipeliningShapeError(f"arguments have a shape mismatch: dim 0 is {sorted(sizes)}")
    if sizes and min(sizes) < chunks:
        raise ValueError(f"a batch of {min(sizes)} cannot be cut into {chunks} microbatches")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            parts = torch.tensor_split(leaf, chunks)
        else:
            parts = [leaf] * chunks
        for row, part in zip(rows, parts, strict=True):
            row.append(part)
    both = [tree_unflatten(row, spec) for row in rows]
    return [a for a, _ in both], [k for _, k in both]


def chunk_weights(targets: Sequence[Any]) -> list[float]:
    """Each microbatch's share of the batch."""
    sizes = [t.shape[0] if isinstance(t, torch.Tensor) and t.dim() else 1 for t in targets]
    return [size / sum(sizes) for size in sizes]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any) -> Any:
    """Concatenate along dim 0."""
    flat = [tree_flatten(chunk) for chunk in chunks]
    merged = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(merged, flat[0][1])
