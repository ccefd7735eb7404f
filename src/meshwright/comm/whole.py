"""Whole tensors from DTensors that are spread over ranks, and the parts that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from meshwright.comm.dtensor import at_rest, dtensor_at_rest, local_box, mesh_communicators
from meshwright.comm.shard_view import ShardView
from meshwright.errors import LayoutError
from meshwright.layout import Box

__all__ = ["Holding", "held", "part_like", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """The elements of a tensor of ``shape`` that this rank holds."""

    local: torch.Tensor
    """The elements of one box after the other, each row-major."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def held(tensor: torch.Tensor, name: str) -> Holding:
    """What this rank holds of a DTensor or `ShardView`; of any other tensor all. Nothing is sent.

    Raises `LayoutError`, with ``name``, where that is a summand, or rows from all over a dim.
    """
    tensor = tensor.detach()
    if isinstance(tensor, ShardView):
        boxes = tuple(box for box, _ in tensor.boxes())
        return Holding(local=tensor.local, shape=tuple(tensor.shape), boxes=boxes)
    if not isinstance(tensor, DTensor):
        local = tensor.to_dense() if tensor.is_sparse else tensor
        shape = tuple(local.shape)
        return Holding(local=local, shape=shape, boxes=(Box((0,) * len(shape), shape),))
    rest = at_rest(tensor)
    box = local_box(rest.shape, rest.mesh, rest.placements)
    is_outside = rest.mesh.get_coordinate() is None
    if (box is None and not is_outside) or any(p.is_partial() for p in rest.placements):
        raise LayoutError(
            f"{name!r} is placed {list(rest.placements)} on {rest.mesh}: expected whole values in "
            "one box on each rank"
        )
    return Holding(local=rest.local, shape=rest.shape, boxes=() if box is None else (box,))


@torch.no_grad()
def whole(tensor: torch.Tensor, *, label: str = "whole tensor") -> torch.Tensor:
    """All of ``tensor``, on every rank; any tensor but a DTensor as it is.

    All ranks of the DTensor's mesh call it together: one gather for each axis that shards.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    rest = at_rest(tensor)
    found = rest.local
    axes = mesh_communicators(rest.mesh)
    # The last axis cut what the ones before had cut, so it is put together first.
    for number in reversed(range(len(axes))):
        placement, axis = rest.placements[number], axes[number]
        if not isinstance(placement, TorchShard):
            continue
        shape = list(rest.shape)
        dim = placement.dim
        others = [p for p in rest.placements[:number] if isinstance(p, TorchShard) and p.dim == dim]
        if others:
            raise LayoutError(f"dim {dim} is sharded over more than one axis: {rest.placements}")
        rows = -(-shape[dim] // axis.size)
        padded = found.movedim(dim, 0)
        mine = padded.new_zeros((rows, *padded.shape[1:]))
        mine[: padded.shape[0]].copy_(padded)
        everyone = mine.new_empty((axis.size * rows, *mine.shape[1:]))
        axis.all_gather(everyone, mine, label=label).wait()
        found = everyone[: shape[dim]].movedim(0, dim)
    return found.contiguous()


@torch.no_grad()
def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of the whole ``tensor``, spread as ``like``; nothing is sent.

    Raises `LayoutError` when their shapes differ.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    rest = at_rest(like)
    box = local_box(rest.shape, rest.mesh, rest.placements)
    if box is None or tuple(tensor.shape) != rest.shape:
        raise LayoutError(f"expected a tensor of shape {rest.shape}, found {tuple(tensor.shape)}")
    local = tensor[box.slices()].clone(memory_format=torch.contiguous_format)
    return dtensor_at_rest(local, rest.mesh, rest.placements, rest.shape, rest.stride)
