"""One parameter of a unit as state dicts see it: its names, its whole shape, this rank's elements.

Values of the model and of its optimizer are saved and loaded by the same two functions::

    save  values_of(parts, elements, form)   whole tensors, DTensors, or a `ShardView` each
    load  part.elements_of(value)            this rank's elements of any of these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import (
    AnyPlacement,
    AtRest,
    concatenated_mesh,
    dtensor_at_rest,
    local_of,
)
from meshwright.comm.dtensors.gather_dtensor import is_side_by_side, part, ranges_held
from meshwright.comm.dtensors.gather_dtensor import whole as gathered
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.exposure import exposed_of, flat_layout, own_pieces
from meshwright.fsdp.groups import Groups
from meshwright.layout import FlatPiece, Replicate, Shard
from meshwright.mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of values in state dicts; all False for a copy of this rank's part."""

    is_full: bool
    offloads: bool = False
    """True for copies on the CPU."""
    shares: bool = False
    """True for the memory itself, of what is spread over the ranks."""

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, or a copy that later steps do not change."""
        if self.shares:
            return value.detach()
        return value.detach().to("cpu" if self.offloads else value.device, copy=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One parameter of a unit, with the piece of it that this rank holds."""

    names: tuple[str, ...]
    group: ParameterGroup
    index: int
    piece: FlatPiece | None
    """This rank's elements in its shard of the group."""
    groups: Groups
    exposed: nn.Parameter
    """The object that the optimizer holds: its own, or the flat parameter of its unit."""
    is_flat: bool

    @property
    def outer(self) -> AtRest | None:
        """The DTensor that the parameter was before wrapping, if any."""
        return self.group.slots[self.index].outer

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of its part in the group's buffer: that of a DTensor's local part."""
        return flat_layout(self.group).shapes[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that users see."""
        return self.local_shape if self.outer is None else self.outer.shape

    @property
    def is_cut(self) -> bool:
        """True where ranks hold different elements."""
        return self.group.axes.shard is not None

    @property
    def counts(self) -> bool:
        """False on a rank without elements if others have some: its step counters do not advance.

        Such a rank gets no gradients.
        """
        return self.is_flat or self.piece is not None

    def found_in(self, given: Mapping[str, T]) -> T | None:
        return next((given[name] for name in self.names if name in given), None)

    def cut(self, line: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements in ``line``, which is laid out as the shard of the group."""
        piece = self.piece
        return line[:0] if piece is None else line[piece.offset : piece.offset + piece.numel]

    def cut_exposed(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements in ``value``, shaped like the exposed parameter."""
        flat = value.reshape(-1)
        return self.cut(flat) if self.is_flat else flat

    def view(self, elements: torch.Tensor) -> torch.Tensor:
        """Make a tensor of the whole shape with local ``elements``."""
        outer, name = self.outer, self.names[0]
        return ShardView(
            elements,
            0 if self.piece is None else self.piece.start,
            self.shape,
            name=name,
            communicator=self.group.axes.shard,
            within=() if outer is None else ranges_held(outer, name),
        )

    def fits(self, value: ShardView) -> bool:
        """Whether a view holds exactly this rank's elements."""
        begin, count = (0, 0) if self.piece is None else (self.piece.start, self.piece.numel)
        # An empty range may begin anywhere.
        return value.local.numel() == count and (value.start == begin or not count)

    def elements_of(self, value: torch.Tensor, label: str) -> torch.Tensor:
        """Return this rank's elements of a value of the whole shape, possibly as a view of it.

        A collective for DTensors, and for views that do not fit.
        """
        if isinstance(value, ShardView):
            if self.fits(value):
                return value.local
            value = value.full_tensor()
        value, piece = gathered(value, label=label), self.piece
        if piece is None:
            return value.detach().reshape(-1)[:0]
        value, outer = value.detach(), self.outer
        if outer is not None:
            value = local_of(part(value, outer.mesh, outer.placements, outer.stride))
        return value.reshape(-1)[piece.start : piece.stop]

    def whole(self, local: torch.Tensor, label: str) -> torch.Tensor:
        """Gather the full tensor from its part in the buffer, over the axes of its DTensor."""
        outer = self.outer
        if outer is None:
            return local
        rest = dtensor_at_rest(local, outer.mesh, outer.placements, outer.shape, outer.stride)
        return gathered(rest, label=label)

    def dtensor(self, local: torch.Tensor, mesh: DeviceMesh, label: str) -> torch.Tensor:
        """Make a DTensor of its part on ``mesh`` and on the axes of tensor parallelism.

        The last data axis shards dim 0, before the axes that sharded it already, as in torch's
        class; another dim if several tensors are concatenated along dim 0.
        """
        outer, tensor = self.outer, self.groups.tensor
        placements: list[AnyPlacement] = [Replicate() for _ in range(mesh.ndim)]
        if outer is not None:
            dims = [dim for dim in range(len(outer.shape)) if not is_side_by_side(outer, dim)]
            placements[-1] = Shard(dims[0]) if dims else Replicate()
            mesh = concatenated_mesh([mesh, outer.mesh])
            placements += outer.placements
        else:
            placements[-1] = Shard(0)
            if tensor is not None:
                mesh = concatenated_mesh([mesh, tensor])
                placements += [Replicate() for _ in range(tensor.ndim)]
        stride = local.stride() if outer is None else outer.stride
        return part(self.whole(local, label), mesh, placements, stride)


def parts_of(unit: Unit, names: Iterable[tuple[str, ...]], groups: Groups) -> list[Part]:
    """List the parameters of ``unit``, in the order of its slots, with the ``names`` of each."""
    is_flat = unit.exposure.one_flat is not None
    exposed, rest = exposed_of(unit).parameters(unit), iter(names)
    found: list[Part] = []
    for group in unit.groups:
        pieces = own_pieces(group)
        for index in range(len(group.slots)):
            own = Part(
                names=next(rest),
                group=group,
                index=index,
                piece=pieces.get(index),
                groups=groups,
                exposed=exposed[0 if is_flat else len(found)],
                is_flat=is_flat,
            )
            found.append(own)
    return found


def by_group(unit: Unit, parts: Iterable[Part]) -> Iterator[tuple[ParameterGroup, list[Part]]]:
    rest = iter(parts)
    for group in unit.groups:
        yield group, [next(rest) for _ in group.slots]


# ------------------------------------------------------------------------------------ lines


@torch.no_grad()
def gather_line(group: ParameterGroup, line: torch.Tensor, label: str) -> torch.Tensor:
    """Gather all shards of a buffer with the layout of ``group``; ``line`` is this rank's."""
    shard = group.axes.shard
    if shard is None or shard.is_alone:
        return line.clone()
    line = line.to(shard.device).contiguous()
    whole = line.new_empty(shard.size * line.numel())
    shard.all_gather(whole, line, label=label).wait()
    return whole


def cut_line(group: ParameterGroup, whole: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors in a whole buffer, as views."""
    layout = flat_layout(group)
    ranges = (layout.range(index) for index in range(len(layout.names)))
    return [
        whole[start:stop].view(shape)
        for (start, stop), shape in zip(ranges, layout.shapes, strict=True)
    ]


def join(parts: Iterable[Part], elements: Iterable[Any], line: torch.Tensor) -> torch.Tensor:
    """Copy this rank's elements of ``parts`` of one group into ``line``, its shard; returns it."""
    for each, own in zip(parts, elements, strict=True):
        if own is not None and own.numel():
            each.cut(line).copy_(own.reshape(-1))
    return line


def values_of(
    parts: Sequence[Part],
    elements: Sequence[torch.Tensor],
    form: Form,
    label: str,
    line: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return values of ``parts`` of one group, of which this rank has ``elements``, in a form.

    Whole tensors and DTensors need one gather for all: a collective. ``line`` is this rank's shard,
    if it already holds ``elements``.
    """
    group, mesh = parts[0].group, parts[0].groups.mesh
    gives_parts = form.shares or (mesh is None and not form.is_full)
    wholes: list[torch.Tensor] | None = None
    if parts[0].is_cut and not gives_parts:
        if line is None:
            shard = group.buffer.shard
            line = join(parts, elements, shard.new_zeros(shard.numel(), dtype=elements[0].dtype))
        wholes = cut_line(group, gather_line(group, line, label))
    found: list[torch.Tensor] = []
    for each, own in zip(parts, elements, strict=True):
        if gives_parts and (each.is_cut or each.outer is not None):
            found.append(each.view(form.of(own)))
            continue
        local = own.view(each.local_shape) if wholes is None else wholes[each.index]
        if form.is_full or wholes is None or mesh is None:
            found.append(form.of(each.whole(local, label)))
        else:
            value = each.dtensor(local, mesh, label)
            found.append(value.cpu() if form.offloads else value)
    return found
