"""This rank's pieces of the parameters of a unit of the facade, and of their gradients.

A unit's parameters lie in one line, which is cut at any element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.gradient_part import gradient_part
from meshwright.comm.dtensors.sharded_axes import is_marked_spread
from meshwright.data_parallel.distributed_parameters import cut_axes, mark_spread
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.parameter_hooks import change_by_hooks
from meshwright.data_parallel.shards.slot import Slot
from meshwright.gradients import mark_mean
from meshwright.layout import FlatLayout, Piece
from meshwright.torch_internals.autograd import backward_hooks_of


def flat_layout(group: ParameterGroup) -> FlatLayout:
    """Find the layout of a unit of the facade: it is always packed."""
    return group.buffer.layout.packed_layout()


def own_pieces(group: ParameterGroup) -> dict[int, Piece]:
    """This rank's piece of each parameter that it has one of, by the parameter's index.

    Every rank has the whole of a parameter that has no elements anywhere.
    """
    layout = flat_layout(group)
    pieces = {piece.index: piece for piece in layout.owned(group.axes.part)}
    for index, shape in enumerate(layout.shapes):
        if 0 in shape:
            pieces[index] = Piece(index, 0, 0, 0)
    return pieces


def cuts_of(group: ParameterGroup, slots: Iterable[Slot]) -> set[tuple[Communicator, ...]]:
    """Over which axes the elements of ``slots`` lie spread."""
    return {cut_axes(slot.outer, group.axes.shard) for slot in slots}


def mark_pieces(
    parameter: nn.Parameter, group: ParameterGroup, slots: Sequence[Slot], *, is_line: bool
) -> None:
    """Tell sums over all parameters which ranks hold the rest of those in ``parameter``.

    And tell optimizers over which its gradient is a mean.
    """
    mark_mean([parameter], group.axes.communicators)
    outers, name = [slot.outer for slot in slots], slots[0].name
    mark_spread(parameter, outers, group.axes.shard, name, is_line=is_line)


def change_piece_by_hooks(
    group: ParameterGroup, parameter: nn.Parameter, gradient: torch.Tensor, name: str
) -> None:
    """Run hooks of ``parameter`` on its gradient, unless this rank has a piece of it.

    Raises RuntimeError then: a hook that takes a norm, say, would go wrong without a word.
    """
    if not backward_hooks_of(parameter):
        return
    if group.axes.shard is not None:
        raise RuntimeError(
            f"{name!r} has a hook on its gradient, of which each rank holds one piece in a line "
            "without shape, so that the hook cannot do what it does in one process. Use "
            "fully_shard, whose hooks get DTensors, or register_post_accumulate_grad_hook, or "
            "change .grad between backward and step"
        )
    change_by_hooks(parameter, gradient, name)


def give_gradient(
    parameter: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Set ``.grad``, of a floating-point parameter perhaps in another dtype than its own."""
    parameter.grad = gradient
    if dtype is not None and gradient.is_floating_point() and parameter.grad is not None:
        # Assigned as data: torch refuses gradients of another dtype, custom optimizers take them.
        parameter.grad.data = gradient.to(dtype)


def part_of(gradient: torch.Tensor, parameter: nn.Parameter, name: str) -> torch.Tensor:
    """``gradient``, in a class that knows that it is a part, where ``parameter`` is one."""
    return gradient_part(gradient, name) if is_marked_spread(parameter) else gradient


def places_in_shards(
    groups: Sequence[ParameterGroup],
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """List each parameter, and its piece as a view of this rank's shard."""
    for group in groups:
        pieces, shard = own_pieces(group), group.buffer.shard
        for index, slot in enumerate(group.slots):
            piece = pieces.get(index)
            if piece is None:
                yield slot, shard[:0]
                continue
            line = shard[piece.offset : piece.offset + piece.numel]
            shape = flat_layout(group).shapes[index]
            yield slot, line if group.axes.shard is not None else line.view(shape)


@torch.no_grad()
def write_back(parameter: nn.Parameter, target: torch.Tensor, name: str) -> None:
    """Copy what the user has put into an exposed parameter to the shard, and look there again."""
    if parameter.device.type != target.device.type:
        raise RuntimeError(
            "Expected `FlatParameter` to be on the compute device or where it is offloaded to, "
            f"{target.device}, but got {parameter.device} for {name}. Move the whole module"
        )
    if parameter.shape != target.shape:
        raise RuntimeError(
            "Cannot writeback when the parameter shape changes: this rank's part has shape "
            f"{tuple(target.shape)}, found {tuple(parameter.shape)} for {name}. "
            "Change parameters inside summon_full_params"
        )
    gradient = parameter.grad
    if gradient is not None and gradient.shape != target.shape:
        raise RuntimeError(
            f"Cannot writeback when the gradient shape changes: expected {tuple(target.shape)}, "
            f"found {tuple(gradient.shape)} for {name}"
        )
    target.copy_(parameter.data)
    parameter.data = target
