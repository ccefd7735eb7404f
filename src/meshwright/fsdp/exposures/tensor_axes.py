"""Parameters that tensor parallelism had sharded before they were wrapped: parts of parts.

::

    whole     a parameter as users know it, shape (8, 6)
    part      the local part of one rank of axis tensor, (4, 6), which is in the unit's buffer
    piece     the elements of the part in this rank's shard

``outer`` is the original DTensor; None where the part is the whole. Gradients are grouped by the
axes over which they are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import (
    dtensor_around,
    known_at_rest,
    local_of,
)
from meshwright.comm.dtensors.gradient_part import plain_gradient
from meshwright.data_parallel.distributed_parameters import LocalParameter, check_axes
from meshwright.data_parallel.shards.replaced_parameters import retire_sharded
from meshwright.data_parallel.shards.slot import Slot
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.exposure import cuts_of, own_pieces
from meshwright.fsdp.groups import Groups
from meshwright.mesh import DeviceMesh


def take_part(slot: Slot, groups: Groups, local: Mapping[int, LocalParameter]) -> None:
    """Replace a DTensor in the modules of ``slot`` by a plain parameter on its local part.

    Raises ValueError if no mesh was given, or one with axes that shard the parameter.
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
    given = slot.original
    slot.outer, slot.computes = outer, local[id(given)]
    slot.original = nn.Parameter(local_of(given).detach(), requires_grad=given.requires_grad)
    slot.show(slot.original)
    retire_sharded(given, slot.name)


def as_parameter(value: torch.Tensor, slot: Slot, *, requires_grad: bool) -> nn.Parameter:
    """Make a parameter on ``value``, a part; a DTensor if the slot had one."""
    if slot.outer is not None:
        value = dtensor_around(value, slot.outer)
    return nn.Parameter(value, requires_grad=requires_grad)


def tensor_mesh(slots: Iterable[Slot]) -> DeviceMesh | None:
    """The common mesh of the DTensors among the parameters of ``slots``; None without one."""
    meshes = {slot.outer.mesh for slot in slots if slot.outer is not None}
    return meshes.pop() if len(meshes) == 1 else None


def gradients_by_axes(
    unit: Unit,
) -> Iterator[tuple[tuple[Communicator, ...], list[torch.Tensor]]]:
    """Group this rank's gradients by the axes that shard them; groups are equal on all ranks."""
    flat = unit.exposure.one_flat
    for group in unit.groups:
        pieces = own_pieces(group)
        line = None if flat is None else plain_gradient(flat)
        if line is not None and len(cuts_of(group, group.slots)) == 1:
            yield from ((axes, [line]) for axes in cuts_of(group, group.slots))
            continue
        for index, slot in enumerate(group.slots):
            piece, own = pieces.get(index), plain_gradient(slot.original)
            if flat is not None:
                own = None
                if line is not None and piece is not None:
                    own = line[piece.offset : piece.offset + piece.numel]
            (axes,) = cuts_of(group, [slot])
            yield axes, [] if own is None else [own]
