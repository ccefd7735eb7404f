"""This rank's gradients of a unit of the facade, by the axes that they lie spread over."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensors.gradient_part import plain_gradient
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.pieces import cuts_of, own_pieces

__all__ = ["gradients_by_axes"]


def gradients_by_axes(
    unit: Unit,
) -> Iterator[tuple[tuple[Communicator, ...], list[torch.Tensor]]]:
    """This rank's gradients, by the axes they lie spread over: the same ones on all ranks."""
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
