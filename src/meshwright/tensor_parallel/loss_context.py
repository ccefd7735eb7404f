"""`loss_parallel`: cross entropy on DTensors whose classes are cut over one dim of their mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.comm.dtensors.dtensor import (
    AtRest,
    is_dtensor,
    known_at_rest,
    mesh_communicators,
    our_placement,
)
from meshwright.comm.dtensors.edges import entered, wrapped
from meshwright.layout import Partial, Placement, Replicate, Shard
from meshwright.tensor_parallel.loss import cross_entropy_of_parts

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within the block, cross entropy does not gather logits whose classes are cut over ranks.

    ``torch.nn.functional.cross_entropy`` and ``torch.nn.CrossEntropyLoss`` of a DTensor then go
    through `cross_entropy_of_parts`; other inputs are computed as before. Exactly one dim of the
    mesh shards the classes, the others shard or replicate. The target has class indices, each rank
    of the sharding dim all of them: a plain tensor, or a DTensor where another dim shards. The
    result is a DTensor. A mean is that over all tokens of the mesh. The backward may be called
    outside of the block.

    Raises ValueError for other placements and for class probabilities.
    """
    with _CrossEntropy():
        yield


class _CrossEntropy(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., torch.Tensor],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = kwargs or {}
        given = args[0] if args else options.get("input")
        if func is functional.cross_entropy and is_dtensor(given):
            return _cross_entropy(*args, **options)
        return func(*args, **options)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As torch's function, for logits that are a DTensor."""
    if size_average is not None or reduce is not None:
        raise ValueError("loss_parallel(): give reduction in place of size_average and reduce")
    rest = known_at_rest(input)
    if rest is None:
        raise ValueError(f"expected a DTensor as logits, found {type(input).__name__}")
    dim = 0 if len(rest.shape) == 1 else 1
    own = [our_placement(found, "logits") for found in rest.placements]
    cutting = _cutting(own, dim)
    placed = [
        Replicate() if number == cutting else _without(found, dim)
        for number, found in enumerate(own)
    ]
    axes = mesh_communicators(rest.mesh, "tensor")
    sharding = [axis for axis, found in zip(axes, placed, strict=True) if isinstance(found, Shard)]
    found = cross_entropy_of_parts(
        entered(input),
        _local(target, placed, rest),
        axes[cutting],
        classes=rest.shape[dim],
        weight=None if weight is None else _local(weight, [Replicate()] * len(own), rest),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        data_axes=sharding if reduction == "mean" else (),
    )
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{reduction!r} is not a reduction: expected none, sum or mean")
    if reduction == "none":
        return wrapped(found, rest.mesh, placed, (*rest.shape[:dim], *rest.shape[dim + 1 :]))
    # Sums of other tokens on each rank are parts of the sum of all.
    is_part = reduction == "sum"
    ends = [Partial() if is_part and isinstance(p, Shard) else Replicate() for p in placed]
    return wrapped(found, rest.mesh, ends, ())


def _cutting(placements: Sequence[Placement], dim: int) -> int:
    """Find the dim of the mesh that shards the classes."""
    cutting = [number for number, found in enumerate(placements) if found == Shard(dim)]
    if len(cutting) != 1:
        raise ValueError(
            f"loss_parallel() requires exactly one mesh dim to shard tensor dimension {dim}, but "
            f"got placements {tuple(placements)} with {len(cutting)} such mesh dim(s)."
        )
    for number, found in enumerate(placements):
        if isinstance(found, Partial):
            raise ValueError(
                "loss_parallel() expects non-TP mesh dims to be Shard or Replicate, got "
                f"{found} at dim {number}."
            )
    return cutting[0]


def _without(placement: Placement, dim: int) -> Placement:
    """Find the placement after dim ``dim`` of the tensor has gone."""
    if isinstance(placement, Shard) and placement.dim > dim:
        return Shard(placement.dim - 1)
    return placement


def _local(tensor: torch.Tensor, placements: Sequence[Placement], like: AtRest) -> torch.Tensor:
    """Compute the local tensor of what is to be placed so on the mesh of ``like``."""
    rest = known_at_rest(tensor)
    if rest is None:
        if any(isinstance(found, Shard) for found in placements):
            raise ValueError(
                "loss_parallel() requires a DTensor (not a plain torch.Tensor) when the derived "
                f"placements {tuple(placements)} contain Shard: wrap it with DTensor.from_local or "
                "distribute_tensor"
            )
        return tensor
    found = [our_placement(each, "target") for each in rest.placements]
    if rest.mesh != like.mesh or found != list(placements):
        raise ValueError(
            f"loss_parallel(): expected a tensor placed {tuple(placements)} on {like.mesh}, found "
            f"{tuple(found)} on {rest.mesh}: redistribute it first"
        )
    return rest.local
