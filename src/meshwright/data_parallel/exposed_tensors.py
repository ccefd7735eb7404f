"""Parameters as DTensors at rest: what optimizers, clipping and state dicts see of a unit.

The local tensor of each DTensor is a view of the unit's shard, so that a step of the optimizer is
what the next gather sends. Modules hold plain tensors from the gather on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from meshwright.comm.dtensor import dtensor_at_rest, dtensor_like, is_dtensor, local_of, savable
from meshwright.data_parallel.distributed_parameters import mark_spread
from meshwright.data_parallel.parameter_hooks import (
    carry_hooks,
    change_by_hooks,
    has_hooks,
    run_after_hooks,
)
from meshwright.data_parallel.unit import ParameterGroup, Slot, Unit
from meshwright.errors import InternalError
from meshwright.layout import ChunkedLayout

__all__ = ["ExposedTensors"]


class _Entry:
    """One parameter as it looks at rest."""

    __slots__ = ("cells", "exposed", "gradient", "shape", "slot", "start", "stop", "trains", "wrap")

    def __init__(self, group: ParameterGroup, index: int) -> None:
        layout = group.buffer.layout
        if not isinstance(layout, ChunkedLayout):
            raise InternalError("a DTensor at rest needs a chunked layout")
        slot = group.slots[index]
        local = group.buffer.local(index)
        self.slot: Slot = slot
        self.shape = local.shape
        self.start = layout.offsets[index]
        self.stop = self.start + local.numel()
        place = slot.place
        if place is None:
            raise InternalError("a DTensor at rest needs a place on a mesh")
        self.wrap = (place.mesh, place.placements, place.shape, _strides(place.shape))
        exposed = nn.Parameter(
            dtensor_at_rest(local, *self.wrap), requires_grad=slot.original.requires_grad
        )
        self.exposed = cast("nn.Parameter", savable(exposed))
        self.exposed.__dict__.update(slot.original.__dict__)
        carry_hooks(slot.original, self.exposed)
        self.trains = self.exposed.requires_grad
        """Whether both required grad when they were compared last."""
        self.cells: list[tuple[dict[str, Any], str]] = []
        self.find_cells()

    def find_cells(self) -> None:
        """Where modules keep it."""
        self.cells = [(module._parameters, name) for module, name in self.slot.places]

    def follow_training(self) -> None:
        """Let the one parameter require grad as the other, that the user has changed, does now."""
        full, exposed = self.slot.full, self.exposed
        is_new = exposed.requires_grad is not self.trains
        self.trains = exposed.requires_grad if is_new else full.requires_grad
        full.requires_grad_(self.trains)
        exposed.requires_grad_(self.trains)


class ExposedTensors:
    """The exposure of `fully_shard`."""

    def __init__(self) -> None:
        self._entries: dict[ParameterGroup, list[_Entry]] = {}
        self._flat: dict[ParameterGroup, nn.Parameter] = {}

    def entries(self, group: ParameterGroup) -> list[_Entry]:
        """The parameters of ``group`` as they look at rest; made when asked for the first time."""
        found = self._entries.get(group)
        if found is None:
            found = [_Entry(group, index) for index in range(len(group.slots))]
            self._entries[group] = found
        return found

    def shown(self, slot: Slot) -> nn.Parameter:
        """What modules hold of ``slot`` at rest."""
        entries = (entry for group in self._entries.values() for entry in group)
        return next(entry.exposed for entry in entries if entry.slot is slot)

    def flat(self, group: ParameterGroup) -> nn.Parameter:
        """The shard of ``group`` as one parameter, whose gradient is set from now on too."""
        found = self._flat.get(group)
        if found is None:
            found = self._flat[group] = nn.Parameter(group.buffer.shard)
            outers = [slot.outer for slot in group.slots]
            mark_spread(found, outers, group.axes.shard, group.slots[0].name)
        return found

    def has_flat(self, group: ParameterGroup, flat: nn.Parameter) -> bool:
        """Whether ``flat`` is the shard of ``group``."""
        return self._flat.get(group) is flat

    def parts_of(
        self, group: ParameterGroup, line: torch.Tensor
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters of ``group``, and a DTensor for each with its part of ``line``."""
        return [
            (e.exposed, dtensor_at_rest(line[e.start : e.stop].view(e.shape), *e.wrap))
            for e in self.entries(group)
        ]

    def forget_places(self) -> None:
        """The slots are used in other places now."""
        for entries in self._entries.values():
            for entry in entries:
                entry.find_cells()

    def show_sharded(self, unit: Unit) -> None:
        """Let modules hold the DTensors, trainable as the whole parameters were until now."""
        for group in unit.groups:
            for entry in self.entries(group):
                if entry.slot.full.requires_grad is not entry.trains:
                    entry.follow_training()
                for cells, name in entry.cells:
                    cells[name] = entry.exposed

    def show_full(self, unit: Unit) -> None:
        """Let modules hold the whole parameters, trainable as the DTensors are now."""
        for group in unit.groups:
            for entry in self.entries(group):
                full = entry.slot.full
                if full.requires_grad is not entry.exposed.requires_grad:
                    full.requires_grad_(entry.exposed.requires_grad)
                entry.trains = full.requires_grad
                for cells, name in entry.cells:
                    cells[name] = full

    def follow_training(self, unit: Unit) -> None:
        """See which of both parameters the user has frozen, or not, while both were there."""
        for group in unit.groups:
            for entry in self.entries(group):
                entry.follow_training()

    def zero_alike(self) -> None:
        """Who zeroed a flat gradient meant those of the parameters too, and the reverse."""
        for group, flat in self._flat.items():
            entries = self.entries(group)
            if flat.grad is None:
                for entry in entries:
                    entry.exposed.grad = None
            elif all(entry.exposed.grad is None for entry in entries):
                flat.grad = None

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """See `Exposure`: the DTensors, and shards that are parameters of their own."""
        flats = [flat for group in unit.groups if (flat := self._flat.get(group)) is not None]
        return [e.exposed for group in unit.groups for e in self.entries(group)] + flats

    def version(self, unit: Unit) -> int:
        """See `Exposure`. Fused writes to DTensors are not counted."""
        return sum(
            [e.exposed._version for group in unit.groups for e in self.entries(group)]
        ) + sum([group.buffer.shard._version for group in unit.groups])

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        """See `Exposure`."""
        return [entry.exposed.requires_grad for entry in self.entries(group)]

    def has_gradients(self, unit: Unit) -> bool:
        """See `Exposure`."""
        flats = (self._flat.get(group) for group in unit.groups)
        return any(flat is not None and flat.grad is not None for flat in flats) or any(
            entry.stop > entry.start and entry.exposed.grad is not None
            for group in unit.groups
            for entry in self.entries(group)
        )

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """Set ``.grad`` to a view of ``reduced``, or add to it; hooks of parameters run."""
        fresh = self._on(group, reduced)
        hooked: list[nn.Parameter] = []
        for entry, gradient, is_used in zip(self.entries(group), fresh, used, strict=True):
            if is_used and has_hooks(entry.exposed) and entry.exposed.requires_grad:
                change_by_hooks(entry.exposed, gradient, entry.slot.name)
                hooked.append(entry.exposed)
        self._add(group, reduced, fresh, used)
        for exposed in hooked:
            run_after_hooks(exposed)
        if hooked:
            self.follow_gradients(group)

    @torch.no_grad()
    def follow_gradients(self, group: ParameterGroup) -> None:
        """Let the flat gradient be what hooks have made of ``.grad`` of the parameters."""
        flat = self._flat.get(group)
        if flat is None or flat.grad is None:
            return
        entries = self.entries(group)
        if all(entry.exposed.grad is None for entry in entries):
            flat.grad = None
            return
        for entry in entries:
            part, gradient = flat.grad[entry.start : entry.stop], entry.exposed.grad
            if gradient is None:
                part.zero_()
            elif local_of(gradient).data_ptr() != part.data_ptr():
                part.copy_(local_of(gradient).reshape(-1))
                entry.exposed.grad = dtensor_like(part.view(entry.shape), entry.exposed)

    def _add(
        self,
        group: ParameterGroup,
        reduced: torch.Tensor,
        fresh: Sequence[torch.Tensor],
        used: Sequence[bool],
    ) -> None:
        flat = self._flat.get(group)
        if flat is not None:
            entries = self.entries(group)
            if flat.grad is not None and any(e.exposed.grad is not None for e in entries):
                flat.grad.add_(reduced)  # the parameters' gradients are views of it
                for e, is_used in zip(entries, used, strict=True):
                    if is_used and e.exposed.grad is None and e.exposed.requires_grad:
                        part = flat.grad[e.start : e.stop].view(e.shape)
                        e.exposed.grad = dtensor_like(part.detach(), e.exposed)
                return
            flat.grad = reduced
            for entry in entries:
                entry.exposed.grad = None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for entry, gradient, is_used in zip(self.entries(group), fresh, used, strict=True):
            exposed = entry.exposed
            if not is_used or not exposed.requires_grad:
                continue
            if exposed.grad is None:
                exposed.grad = gradient
            else:
                targets.append(local_of(exposed.grad))
                sources.append(local_of(gradient))
        if targets:
            torch._foreach_add_(targets, sources)

    def _on(self, group: ParameterGroup, reduced: torch.Tensor) -> list[torch.Tensor]:
        """A DTensor for each parameter of ``group``, with its part of ``reduced``.

        Where that is memory which is kept from step to step, so are they.
        """
        kept = group.kept
        is_kept = kept.holds(reduced)
        if is_kept and kept.guests:
            return [guest for guest, _ in kept.guests]
        entries = self.entries(group)
        made: list[torch.Tensor] = [
            # Detached, since a view would hold on to the tensor that it is of.
            dtensor_like(reduced[e.start : e.stop].view(e.shape).detach(), e.exposed)
            for e in entries
        ]
        if is_kept:
            kept.guests = [(dt, e.exposed) for dt, e in zip(made, entries, strict=True)]
        return made

    @torch.no_grad()
    def take_over(self, unit: Unit) -> None:
        """Follow what modules hold now: other values, dtypes, devices or parameter objects."""
        for group in unit.groups:
            group.kept.forget()
            held = [_held(entry) for entry in self.entries(group)]
            first = held[0]
            kind = (first.dtype, local_of(first).device)
            if kind != (group.types.master, group.buffer.shard.device):
                group.convert(*kind)
            for index, (entry, parameter) in enumerate(zip(self.entries(group), held, strict=True)):
                mine = group.buffer.local(index)
                _check_held(entry, parameter, mine)
                theirs = local_of(parameter)
                if theirs.data_ptr() != mine.data_ptr() and not theirs.is_meta:
                    mine.copy_(theirs)
                entry.exposed = parameter
                # The parameter stays the object that optimizers know; its memory is the shard's.
                parameter._local_tensor = mine.detach()


def _held(entry: _Entry) -> Any:  # noqa: ANN401
    cells, name = entry.cells[0]
    return cells[name]


def _check_held(entry: _Entry, held: torch.Tensor, mine: torch.Tensor) -> None:
    if not is_dtensor(held) or local_of(held).shape != mine.shape or held.dtype != mine.dtype:
        raise RuntimeError(
            f"expected {entry.slot.name!r} to be a DTensor of {mine.dtype} with a local tensor of "
            f"shape {tuple(mine.shape)}, found {type(held).__name__} of {held.dtype} and shape "
            f"{tuple(local_of(held).shape)}. Put sharded tensors into sharded modules"
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
