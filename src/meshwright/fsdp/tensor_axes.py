"""Parameters that tensor parallelism has cut before they were wrapped: parts of parts.

::

    whole     a parameter as users know it, shape (8, 6)
    part      what one rank of axis tensor has of it, (4, 6): this is what lies in a unit's line
    piece     the elements of the part in this rank's shard

``outer`` is the DTensor that the parameter was; None where the part is the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.comm.dtensor import (
    AtRest,
    concatenated_mesh,
    cut_once_more,
    dtensor_at_rest,
    known_at_rest,
    local_of,
)
from meshwright.comm.whole import part, whole
from meshwright.data_parallel.distributed_parameters import LocalParameter, check_axes
from meshwright.data_parallel.placement import even_dim
from meshwright.data_parallel.unit import Slot
from meshwright.errors import LayoutError
from meshwright.fsdp.groups import Groups
from meshwright.layout import Placement, Replicate, Shard, chunk

__all__ = ["on_all_axes", "part_of", "take_part", "whole_of", "whole_shape"]


def take_part(slot: Slot, groups: Groups, local: Mapping[int, LocalParameter]) -> None:
    """Let the modules of ``slot`` hold a plain parameter on the part, where it is a DTensor.

    Raises ValueError where no mesh was given, or one with axes that cut the parameter.
    """
    outer = known_at_rest(slot.original)
    if outer is None:
        return
    if groups.mesh is None:
        raise ValueError(
            f"parameter {slot.name!r} is a DTensor on {outer.mesh}: FullyShardedDataParallel needs "
            'the data axes of the same mesh, for example device_mesh=mesh["shard"]'
        )
    for axis in groups.axes.communicators:
        check_axes(slot.name, outer, axis)
    slot.outer = outer
    slot.computes = local[id(slot.original)]
    slot.original = nn.Parameter(
        local_of(slot.original).detach(), requires_grad=slot.original.requires_grad
    )
    slot.show(slot.original)


def whole_shape(shape: Sequence[int], outer: AtRest | None) -> tuple[int, ...]:
    """The shape of the whole of which the part has ``shape``."""
    return tuple(shape) if outer is None else outer.shape


def whole_of(part: torch.Tensor, outer: AtRest | None, label: str) -> torch.Tensor:
    """The whole of a part; a collective over the axes that cut it."""
    if outer is None:
        return part
    found = dtensor_at_rest(part, outer.mesh, outer.placements, outer.shape, outer.stride)
    return whole(found, label=label)


def part_of(value: torch.Tensor, outer: AtRest | None) -> torch.Tensor:
    """This rank's part of a whole ``value``."""
    if outer is None:
        return value
    return local_of(part(value, outer.mesh, outer.placements, outer.stride))


def on_all_axes(part: torch.Tensor, outer: AtRest, groups: Groups) -> torch.Tensor:
    """A part as a DTensor on the data axes and those that have cut it before.

    What cannot be cut evenly twice is left whole over the data axes.
    """
    if groups.mesh is None:
        raise LayoutError("a part of a DTensor needs the mesh of the data axes")
    mesh = concatenated_mesh([groups.mesh, outer.mesh])
    cutting = groups.mesh.ndim - 1
    placements: list[Placement] = [Replicate() for _ in range(groups.mesh.ndim)]
    dim = even_dim(outer, groups.shard.size)
    if dim is not None:
        start, length = chunk(part.shape[dim], groups.shard.size, groups.shard.rank)
        part = part.narrow(dim, start, length)
        placements[cutting] = Shard(dim)
    spread = [*placements, *outer.placements]
    if dim is not None:
        spread = list(cut_once_more(spread, mesh, cutting, dim)[0])
    local = part.clone(memory_format=torch.contiguous_format)
    return dtensor_at_rest(local, mesh, spread, outer.shape, outer.stride)
