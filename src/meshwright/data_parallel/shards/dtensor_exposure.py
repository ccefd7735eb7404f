"""The DTensors of a unit at rest, which optimizers, clipping and state dicts see.

The local tensor of each DTensor is a view of the unit's shard, so the next gather sends what an
optimizer step has written. Modules hold plain tensors from the gather on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_hooks, run_after_hooks
from meshwright.comm.dtensors.dtensor import (
    beginning_storage,
    dtensor_at_rest,
    dtensor_like,
    is_dtensor,
    local_of,
    parameter_at_rest,
    put_on_mesh,
)
from meshwright.comm.dtensors.gradient_part import gradient_part, plain
from meshwright.comm.dtensors.sharded_axes import is_marked_spread
from meshwright.data_parallel.distributed_parameters import mark_spread
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.replaced_parameters import data_assigned, replaced
from meshwright.data_parallel.shards.slot import (
    HOME,
    Slot,
    accumulators_of,
    carry_hooks,
    change_by_hooks,
)
from meshwright.data_parallel.shards.unit import Exposure, Phase, Unit
from meshwright.errors import InternalError
from meshwright.gradients import mark_mean, warn_of_zeros
from meshwright.layout import contiguous_strides
from meshwright.mesh import DeviceMesh
from meshwright.torch_internals.autograd import backward_hooks_of
from meshwright.torch_internals.modules import lent_now
from meshwright.torch_internals.tensors import (
    foreach_add_,
    local_tensor_of,
    set_local_tensor,
    version_of,
)

_TRAINS = attrgetter("exposed.requires_grad")


class _ShardedParameter:
    """One parameter as it appears at rest."""

    __slots__ = (
        "__weakref__",
        "address",
        "cells",
        "exposed",
        "guard",
        "local",
        "shape",
        "slot",
        "start",
        "stop",
        "storage",
        "trains",
    )

    def __init__(self, group: ParameterGroup, index: int, before: nn.Parameter) -> None:
        slot, local = group.slots[index], group.buffer.around(index)
        self.slot: Slot = slot
        self.shape = tuple(local.shape)
        self.start = group.buffer.layout.offsets[index]
        self.stop = self.start + local.numel()
        trains = slot.original.requires_grad
        shown: Any = parameter_at_rest(local, *self.wrap, requires_grad=trains)
        shown.__dict__.update(before.__dict__)
        carry_hooks(before, shown, slot.name)
        self.exposed = shown
        self.guard: object | None = None
        """Rejects gradients past the hooks while it lives; torch swaps tensors only without it."""
        self.note_memory()
        self.trains = trains
        """True when both required grad when they were compared last."""
        self.find_cells()

    @property
    def wrap(self) -> tuple[DeviceMesh, tuple[Any, ...], tuple[int, ...], tuple[int, ...]]:
        """Return its mesh, placements, shape and strides."""
        place = self.slot.place
        if place is None:
            raise InternalError("a DTensor at rest needs a place on a mesh")
        return place.mesh, place.placements, place.shape, contiguous_strides(place.shape)

    def find_cells(self) -> None:
        """Find the module dicts and names that hold the parameter, and put it there."""
        self.cells = tuple([(module._parameters, name) for module, name in self.slot.places])
        for cells, name in self.cells:
            cells[name] = self.exposed

    def replaced(self, cells: dict[str, Any], name: str) -> RuntimeError:
        """Make the error for what ``cells`` hold in place of the parameter."""
        slot = self.slot
        module = next(m for m, n in slot.places if m._parameters is cells and n == name)
        axes = () if slot.place is None else slot.place.axes.reached
        return replaced(slot.name, module, cells.get(name), slot.full.shape, axes)

    def note_memory(self) -> None:
        """Remember the memory of ``exposed``, to notice when it is replaced."""
        if self.slot.extension is not None:
            self.slot.extension.part = local_tensor_of(self.exposed)
        self.local = local_tensor_of(self.exposed)
        self.address = self.local.data_ptr()
        self.storage = self.exposed.untyped_storage()

    def part_of(self, line: torch.Tensor) -> torch.Tensor:
        """View this rank's part of the parameter in ``line``, which is laid out as the shard."""
        return line[self.start : self.stop].view(self.shape)

    def gradient_on(self, line: torch.Tensor, *, is_shown: bool) -> torch.Tensor:
        """Make a DTensor on its part of ``line``, as a view of it if users see ``line``, too."""
        # Detached, since a view would hold on to the tensor that it is of.
        part = self.part_of(line).detach()
        return dtensor_like(part if is_shown else beginning_storage(part), self.exposed)

    def follow_training(self) -> None:
        """Give both parameters the ``requires_grad`` of the one that the user has changed."""
        full, exposed = self.slot.full, self.exposed
        is_new = exposed.requires_grad is not self.trains
        self.trains = exposed.requires_grad if is_new else full.requires_grad
        full.requires_grad_(self.trains)
        exposed.requires_grad_(self.trains)


class ExposedTensors(Exposure):
    """The parameter views of `fully_shard`."""

    def __init__(self) -> None:
        self._entries: dict[ParameterGroup, list[_ShardedParameter]] = {}
        self._has_run = False
        """True once modules have been shown whole parameters: none is taken over from then on."""
        self._flat: dict[ParameterGroup, nn.Parameter] = {}
        self._delivered: set[ParameterGroup] = set()
        """The groups whose flat gradient was set, and not seen zeroed since."""
        self._guarded: set[ParameterGroup] = set()
        """The groups that have begun a pass: gradients past the hooks are rejected."""

    def _new_entries(self, group: ParameterGroup) -> list[_ShardedParameter]:
        known = {e.slot: e.exposed for entries in self._entries.values() for e in entries}
        before = [known.get(slot, slot.original) for slot in group.slots]
        found = [_ShardedParameter(group, index, given) for index, given in enumerate(before)]
        self._entries[group] = found
        # Statistics of experts ask between forward and backward, too.
        fulls = [entry.slot.full for entry in found if entry.slot.outer is not None]
        mark_mean([*(entry.exposed for entry in found), *fulls], group.axes.reached)
        return found

    def shown(self, slot: Slot) -> nn.Parameter:
        entries = reversed(self._entries.values())
        return next(e.exposed for group in entries for e in group if e.slot is slot)

    def shows(self, parameter: nn.Parameter) -> bool:
        return any(e.exposed is parameter for group in self._entries.values() for e in group)

    def shard_of(self, group: ParameterGroup) -> nn.Parameter:
        """Return the shard of ``group`` as one parameter; from now on its ``.grad`` is set, too.

        Raises ValueError for tensor subclasses that define what an optimizer does to them.
        """
        found = self._flat.get(group)
        if group.slots[0].extension is not None:
            raise ValueError(
                f"parameter {group.slots[0].name!r} is a tensor subclass with calls of its own for "
                "what an optimizer does to it: build the optimizer of the module's parameters"
            )
        if found is None:
            found = self._flat[group] = nn.Parameter(beginning_storage(group.buffer.shard))
            outers = [slot.outer for slot in group.slots]
            mark_spread(found, outers, group.axes.shard, group.slots[0].name)
        return found

    def parts_of(
        self, group: ParameterGroup, flat: nn.Parameter, line: torch.Tensor
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        entries = self._entries[group] if self._flat.get(group) is flat else ()
        return [
            (e.exposed, dtensor_at_rest(beginning_storage(e.part_of(line)), *e.wrap))
            for e in entries
        ]

    @torch.no_grad()
    def follow_places(self) -> None:
        """Move parameters to the placements of slots: on a larger mesh, with equal local parts."""
        for group, entries in self._entries.items():
            group.kept.forget()
            for entry in entries:
                (mesh, placements, *_), exposed = entry.wrap, entry.exposed
                if mesh is not exposed.device_mesh:
                    gradient, exposed.grad = exposed.grad, None
                    put_on_mesh(exposed, mesh, placements)
                    if gradient is not None:
                        exposed.grad = dtensor_like(local_of(gradient), exposed)

    def forget_places(self) -> None:
        """Look up the modules of all slots again, because other modules use them now."""
        for entries in self._entries.values():
            for entry in entries:
                entry.find_cells()

    def let_go(self, unit: Unit) -> None:
        for group in unit.groups:
            self._guarded.discard(group)
            for entry in self._entries[group]:
                entry.guard = None

    def refresh(self, unit: Unit) -> None:
        """See `Exposure`: checks each parameter, its memory and what modules hold."""
        if self._flat:
            self._zero_alike()
        shows_full, is_same = unit.phase is Phase.FULL and not unit.is_at_rest, True
        for group in unit.groups:
            if group not in self._guarded:
                self._guard(group)
            flat = self._flat.get(group)
            if flat is not None and flat.data_ptr() != group.buffer.shard.data_ptr():
                raise data_assigned(group.slots[0].name, group.axes.reached)
            for entry in self._entries[group]:
                exposed, full = entry.exposed, entry.slot.full
                local = local_tensor_of(exposed)
                # Conversions give the same parameter another local tensor. What is sent to another
                # process by torch.multiprocessing keeps its own, which moves to shared memory.
                if local is not entry.local or local.data_ptr() != entry.address:
                    is_same = False
                elif exposed.untyped_storage() is not entry.storage:
                    raise data_assigned(entry.slot.name, group.axes.reached)
                shown = full if shows_full else exposed
                for cells, name in entry.cells:
                    found = cells.get(name)
                    if found is full or found is exposed:
                        # `torch.func.functional_call` puts back what it found when it began.
                        cells[name] = shown
                    else:
                        is_same = False
        if not is_same:
            unit.reshard()
            self.take_over(unit)
            for group in unit.groups:
                self._guard(group)

    def _guard(self, group: ParameterGroup) -> None:
        """Reject gradients that bypass hooks of trainable parameters; none exist before a pass."""
        self._guarded.add(group)
        entries = self._entries[group]
        new = [e for e in entries if e.guard is None and e.exposed.requires_grad]
        for entry, guard in zip(new, _refuse_past_hooks(new), strict=True):
            entry.guard = guard

    def show_sharded(self, unit: Unit) -> None:
        """Put the DTensors into the modules, with the ``requires_grad`` of the whole parameters."""
        for group in unit.groups:
            for entry in self._entries.get(group) or self._new_entries(group):
                exposed, full = entry.exposed, entry.slot.full
                if full.requires_grad is not entry.trains:
                    entry.follow_training()
                    self._guarded.discard(group)
                for cells, name in entry.cells:
                    if cells.get(name) is not full and cells.get(name) is not exposed:
                        raise entry.replaced(cells, name)
                    cells[name] = exposed

    def show_full(self, unit: Unit) -> None:
        """Put the whole parameters into the modules, with the ``requires_grad`` of the DTensors."""
        self._has_run = True
        for group in unit.groups:
            for entry in self._entries[group]:
                exposed, full = entry.exposed, entry.slot.full
                if not (full.requires_grad is entry.trains is exposed.requires_grad):
                    if full.requires_grad is not exposed.requires_grad:
                        full.requires_grad_(exposed.requires_grad)
                        self._guard(group)
                    entry.trains = full.requires_grad
                for cells, name in entry.cells:
                    if cells.get(name) is not exposed and cells.get(name) is not full:
                        raise entry.replaced(cells, name)
                    cells[name] = full

    def follow_training(self, unit: Unit) -> None:
        for group in unit.groups:
            for entry in self._entries[group]:
                entry.follow_training()
            self._guard(group)

    def _zero_alike(self) -> None:
        """Zero the parameters' gradients where a flat one was zeroed, and the reverse."""
        for group, flat in self._flat.items():
            entries = self._entries[group]
            if flat.grad is None:
                # What a loss has left that read the DTensors since waits for the next mean.
                for entry in entries if group in self._delivered else ():
                    entry.exposed.grad = None
                self._delivered.discard(group)
            elif all(entry.exposed.grad is None for entry in entries):
                flat.grad = None

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """See `Exposure`: the DTensors, and shards that are parameters themselves."""
        flats = [flat for group in unit.groups if (flat := self._flat.get(group)) is not None]
        return [e.exposed for group in unit.groups for e in self._entries[group]] + flats

    def version(self, unit: Unit) -> int:
        """See `Exposure`. Fused writes to DTensors are not counted."""
        found = 0
        for group in unit.groups:
            found += version_of(group.buffer.shard)
            for entry in self._entries[group]:
                found += version_of(entry.exposed)
        return found

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        return [*map(_TRAINS, self._entries[group])]

    def has_gradients(self, unit: Unit) -> bool:
        for group in unit.groups:
            if group in self._flat and self._flat[group].grad is not None:
                return True
            for entry in self._entries[group]:
                if entry.stop > entry.start and entry.exposed.grad is not None:
                    return True
        return False

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """Set ``.grad`` to a view of ``reduced``, or add to it; hooks of parameters run.

        Nothing happens where no rank has a gradient, as when only input gradients were requested.
        """
        if not any(used) and not self._has_direct(group):
            return
        fresh = self._on(group, reduced)
        hooked: list[nn.Parameter] = []
        for entry, gradient, is_used in zip(self._entries[group], fresh, used, strict=True):
            if is_used and has_hooks(entry.exposed) and entry.exposed.requires_grad:
                change_by_hooks(entry.exposed, gradient, entry.slot.name)
                hooked.append(entry.exposed)
        if group not in self._flat or not self._add_to_flat(group, reduced, used):
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for entry, gradient, is_used in zip(self._entries[group], fresh, used, strict=True):
                exposed = entry.exposed
                if exposed.grad is not None and exposed.grad.placements != exposed.placements:
                    # A loss has read the DTensor itself, and autograd left what was easiest for it.
                    exposed.grad = exposed.grad.redistribute(placements=exposed.placements)
                if not is_used or not exposed.requires_grad:
                    continue
                if exposed.grad is None:
                    exposed.grad = gradient
                else:
                    targets.append(local_of(exposed.grad))
                    sources.append(local_of(gradient))
            if targets:
                foreach_add_(targets, sources)
        for exposed in hooked:
            run_after_hooks(exposed)
        if hooked:
            self.follow_gradients(group)
        if group in self._flat:
            unused = [s.name for s, has in zip(group.slots, used, strict=True) if not has]
            warn_of_zeros(self._flat[group], lambda: unused)
            _run_hooks_of_flat(self._flat[group], group.slots[0].name, len(group.slots))

    def _has_direct(self, group: ParameterGroup) -> bool:
        """Whether a loss has left gradients that the flat one does not have."""
        flat = self._flat.get(group)
        if flat is None or flat.grad is not None:
            return False
        return any(entry.exposed.grad is not None for entry in self._entries[group])

    @torch.no_grad()
    def follow_gradients(self, group: ParameterGroup) -> None:
        """Copy what hooks have made of the parameters' ``.grad`` to the flat gradient."""
        flat = self._flat.get(group)
        if flat is None or flat.grad is None:
            return
        entries, line = self._entries[group], plain(flat.grad)
        if all(entry.exposed.grad is None for entry in entries):
            flat.grad = None
            return
        for entry in entries:
            part, gradient = line[entry.start : entry.stop], entry.exposed.grad
            if gradient is None:
                part.zero_()
            elif local_of(gradient).data_ptr() != part.data_ptr():
                part.copy_(local_of(gradient).reshape(-1))
                entry.exposed.grad = entry.gradient_on(line, is_shown=True)

    def _add_to_flat(
        self, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> bool:
        """Set or add to the flat gradient; True where the parameters' gradients follow it."""
        flat, entries = self._flat[group], self._entries[group]
        self._delivered.add(group)
        if flat.grad is not None and any(e.exposed.grad is not None for e in entries):
            flat.grad.add_(reduced)  # the parameters' gradients are views of it
            for e, is_used in zip(entries, used, strict=True):
                if is_used and e.exposed.grad is None and e.exposed.requires_grad:
                    e.exposed.grad = e.gradient_on(plain(flat.grad), is_shown=True)
            return True
        for entry in entries:
            if entry.exposed.grad is not None:  # of a loss that has read the DTensor itself
                own = entry.exposed.grad.redistribute(placements=entry.exposed.placements)
                entry.part_of(plain(reduced)).add_(local_of(own))
        name = entries[0].slot.name
        flat.grad = gradient_part(reduced, name) if is_marked_spread(flat) else reduced
        for entry in entries:
            entry.exposed.grad = None
        return False

    def _on(self, group: ParameterGroup, reduced: torch.Tensor) -> list[torch.Tensor]:
        """Make a DTensor for each parameter of ``group``, with its part of ``reduced``.

        They are cached if ``reduced`` is memory that is kept from step to step.
        """
        kept = group.kept
        is_kept = kept.holds(reduced)
        if is_kept and kept.guests:
            return [guest for guest, _ in kept.guests]
        entries = self._entries[group]
        is_shown = group in self._flat
        made = [entry.gradient_on(reduced, is_shown=is_shown) for entry in entries]
        if is_kept:
            kept.guests = [(dt, e.exposed) for dt, e in zip(made, entries, strict=True)]
        return made

    @torch.no_grad()
    def take_over(self, unit: Unit) -> None:
        """Take over what modules hold now: other values, dtypes and devices.

        Before the first gather also other DTensor parameters with the same layout, as loaders leave
        them. Callers that hold the former parameters keep these, and their memory.
        """
        for group in unit.groups:
            entries = self._entries[group]
            held = [self._held(entry) for entry in entries]
            for entry, parameter in zip(entries, held, strict=True):
                _check_alike(entry, parameter, held[0])
            group.kept.forget()
            group.carry_starts([local_of(parameter) for parameter in held])
            kind = held[0].dtype, local_of(held[0]).device
            has_moved = any(
                local_of(parameter).data_ptr() != group.buffer.local(index).data_ptr()
                for index, parameter in enumerate(held)
            )
            # What somebody else may hold now keeps its memory.
            if has_moved or kind != (group.types.master, group.buffer.shard.device):
                group.convert(*kind)
                if group in self._flat:
                    self._flat[group].data = beginning_storage(group.buffer.shard)
            for index, (entry, parameter) in enumerate(zip(entries, held, strict=True)):
                mine, theirs = group.buffer.local(index), local_of(parameter)
                if theirs.data_ptr() != mine.data_ptr() and not theirs.is_meta:
                    mine.copy_(theirs)
                if parameter is not entry.exposed:
                    parameter.__dict__[HOME] = entry.exposed.__dict__.get(HOME)
                    entry.slot.full.requires_grad_(parameter.requires_grad)
                    entry.trains = parameter.requires_grad
                # The object that optimizers know stays; its memory is the shard's.
                entry.exposed, entry.guard = parameter, None
                for cells, name in entry.cells:
                    cells[name] = parameter
                set_local_tensor(parameter, group.buffer.around(index))
                entry.note_memory()
            self._guarded.discard(group)
        unit.has_changed()

    def _held(self, entry: _ShardedParameter) -> Any:  # noqa: ANN401
        """Return the DTensor parameter that all modules hold. Raises RuntimeError for any other.

        The modules of a tied parameter may hold several with the same values, as
        ``load_state_dict`` with ``assign=True`` leaves them.
        """
        first, key = entry.cells[0]
        held = first.get(key)
        for cells, name in entry.cells:
            found = cells.get(name)
            if found is held is entry.exposed:
                continue
            is_late = self._has_run or lent_now() is not None
            is_alike = isinstance(found, nn.Parameter) and is_dtensor(found)
            is_same = found is held or (is_alike and is_dtensor(held) and _have_same(found, held))
            if is_late or not is_alike or not is_same or _belongs_elsewhere(entry, found):
                raise entry.replaced(cells, name)
        return held


class _Refusal:
    """The hook of a graph node that leads to ``.grad`` of a parameter at rest."""

    __slots__ = ("_guarded",)

    def __init__(self, guarded: _ShardedParameter) -> None:
        # Not the parameter, nor a weak reference to it, with which torch would not swap its tensor.
        self._guarded = weakref.ref(guarded)

    def __call__(self, gradients: object) -> None:
        found = self._guarded()
        if found is not None and has_hooks(found.exposed):
            raise RuntimeError(
                f"the loss has read parameter {found.slot.name!r}, which is sharded, beside its "
                "module, and the parameter has hooks, or an optimizer in the backward: these would "
                "be given the gradient in two parts. Compute that term inside of the forward of "
                "the module that uses the parameter, or step and change gradients after the "
                "backward"
            )


def _refuse_past_hooks(parameters: Sequence[_ShardedParameter]) -> list[object]:
    """Reject a backward that reaches a parameter at rest directly while it has hooks.

    A loss that uses the parameter does: the hooks would run for that term, and again for the mean.
    Returns for each parameter, all requiring grad, the node that keeps the check alive.
    """
    if not parameters:
        return []
    nodes = accumulators_of([each.exposed for each in parameters])
    for node, each in zip(nodes, parameters, strict=True):
        node.register_prehook(_Refusal(each))
    return [*nodes]  # torch holds them weakly: the hooks end with the last reference


def _run_hooks_of_flat(flat: nn.Parameter, name: str, count: int) -> None:
    """Run the post-accumulate hooks of a flat parameter of ``count`` parameters, first ``name``.

    Raises RuntimeError for hooks on the gradient itself.
    """
    if backward_hooks_of(flat):
        raise RuntimeError(
            f"the flat parameter of {name!r} and {count - 1} more has a hook on its gradient, "
            "which no shape and no parameter belongs to: put the hook on the parameters of the "
            "model, which are DTensors"
        )
    run_after_hooks(flat)


def _have_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two DTensors have the same layout, and the same values on this rank."""
    mine, theirs = local_of(one), local_of(other)
    lies = [(each.device_mesh, each.placements, each.shape, each.dtype) for each in (one, other)]
    return lies[0] == lies[1] and mine.device == theirs.device and torch.equal(mine, theirs)


def _belongs_elsewhere(entry: _ShardedParameter, parameter: nn.Parameter) -> bool:
    """Whether another slot's unit shows ``parameter``: nothing would tie the two."""
    held = parameter.__dict__.get(HOME)
    slot = None if held is None else held()
    driver = None if slot is None or slot is entry.slot else slot.driver
    return driver is not None and driver.unit is not None and driver.unit.exposure.shows(parameter)


def _check_alike(entry: _ShardedParameter, held: Any, first: Any) -> None:  # noqa: ANN401
    """Raise RuntimeError unless ``held`` has the parameter's layout and the kind of ``first``."""
    before = entry.exposed
    lies = (held.shape, held.placements, local_of(held).shape)
    expected = (before.shape, before.placements, entry.shape)
    kinds = [(each.dtype, local_of(each).device) for each in (held, first)]
    if lies != expected or held.device_mesh != before.device_mesh or kinds[0] != kinds[1]:
        raise RuntimeError(
            f"expected {entry.slot.name!r} to be a DTensor of {first.dtype} on "
            f"{local_of(first).device} like the rest of its unit, of (shape, placements, local "
            f"shape) {expected} on {before.device_mesh}; found {held.dtype} on "
            f"{local_of(held).device}, {lies} on {held.device_mesh}. Put sharded tensors into "
            "sharded modules, and convert units as a whole"
        )
