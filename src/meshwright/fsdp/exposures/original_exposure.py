"""The view of a unit that keeps the original parameter objects, each with its local piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_hooks, run_after_hooks
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.replaced_parameters import replaced
from meshwright.data_parallel.shards.slot import Slot
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.exposure import (
    Exposed,
    change_piece_by_hooks,
    give_gradient,
    mark_pieces,
    own_pieces,
    part_of,
    places_in_shards,
    write_back,
)
from meshwright.torch_internals.modules import lent_now
from meshwright.torch_internals.tensors import version_of

TAKEN = "_meshwright_unit_name"
"""An attribute of parameters that a unit has taken over."""


class OriginalExposure(Exposed):
    """The original parameter objects, each with this rank's piece as a 1-D tensor.

    They keep their shapes if nothing is sharded.
    """

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        super().__init__(gradient_dtype)
        self._targets: list[tuple[Slot, torch.Tensor]] = []
        """Each parameter, and its place in the shard."""
        self._trained: dict[Slot, bool] = {}
        """True for each whole parameter that required grad when modules were shown it last."""

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        return [slot.original for slot in unit.slots]

    def registered(self, unit: Unit) -> list[torch.Tensor]:
        places = [(slot, *slot.places[0]) for slot in unit.slots]
        held = [(slot, module._parameters.get(name)) for slot, module, name in places]
        return [slot.original if t is None or t is slot.full else t for slot, t in held]

    def show_sharded(self, unit: Unit) -> None:
        if not self._targets:
            self._point(unit)
        self.list_at_rest(unit)

    def show_full(self, unit: Unit) -> None:
        self._seen = self.version(unit)
        self._lists_full = True
        for slot in unit.slots:
            full, original = slot.full, slot.original
            if full.requires_grad is not original.requires_grad:
                full.requires_grad_(original.requires_grad)
            self._trained[slot] = full.requires_grad
            for module, name in slot.places:
                found = module._parameters.get(name)
                if found is original:
                    module._parameters[name] = full
                elif found is not full:
                    raise replaced(slot.name, module, found, slot.leaf.shape, unit.communicators)

    def list_full(self, unit: Unit) -> None:
        if not self._lists_full:
            self.show_full(unit)

    def list_at_rest(self, unit: Unit) -> None:
        for slot in unit.slots:
            full, original = slot.full, slot.original
            if full.requires_grad is not self._trained.get(slot, True):
                # Whoever changed it saw the full one.
                original.requires_grad_(full.requires_grad)
                self._trained[slot] = full.requires_grad
            for module, name in slot.places:
                found = module._parameters.get(name)
                if found is full:
                    module._parameters[name] = original
                elif found is not original:
                    raise replaced(slot.name, module, found, slot.leaf.shape, unit.communicators)
        self._lists_full = False

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        return [slot.original.requires_grad for slot in group.slots]

    def has_gradients(self, unit: Unit) -> bool:
        """See `Exposure`. A parameter without elements on this rank never has a gradient here."""
        return any(slot.original.grad is not None for slot in unit.slots)

    def is_replaced(self, unit: Unit) -> bool:
        for slot, target in self._targets:
            module, name = slot.places[0]
            original = slot.original
            held = module._parameters.get(name)
            if held is not original and held is not slot.full:
                return True
            if original.data_ptr() != target.data_ptr():
                return True
        return False

    def version(self, unit: Unit) -> int:
        # The originals have counters of their own: the shard's does not see what they are given.
        return sum(version_of(slot.original) for slot in unit.slots)

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """See `Exposure`. Parameters that only other ranks hold, or that nobody used, get none."""
        hooked: list[nn.Parameter] = []
        for slot, part, is_used in zip(group.slots, self._on(group, reduced), used, strict=True):
            original = slot.original
            if not is_used or not original.requires_grad:
                continue
            if has_hooks(original):
                nothing = reduced[:0].view(original.shape) if part is None else part
                change_piece_by_hooks(group, original, nothing, slot.name)
                hooked.append(original)
            if part is None:
                continue
            if original.grad is None:
                give_gradient(original, part, self._gradient_dtype)
            else:
                original.grad.add_(part)
        for original in hooked:
            run_after_hooks(original)

    def show_waiting(self, unit: Unit) -> bool:
        gradients = [gradient for group in unit.groups for gradient in group.waiting()]
        dtypes = [group.types.compute for group in unit.groups for _ in group.slots]
        return self._waiting.show(unit.name, self.parameters(unit), gradients, dtypes)

    def take_waiting(self, unit: Unit) -> bool:
        taken = self._waiting.take()
        dropped = iter(taken)
        for group in unit.groups:
            gone = [n for n, is_gone in enumerate(islice(dropped, len(group.slots))) if is_gone]
            if gone:
                group.forget_waiting(gone)
        return bool(taken)

    def _on(self, group: ParameterGroup, reduced: torch.Tensor) -> list[torch.Tensor | None]:
        """Return each parameter's part of ``reduced``; None for one without elements here.

        They are cached if ``reduced`` is memory that is kept from step to step.
        """
        kept, slots = group.kept, group.slots
        is_kept = kept.holds(reduced) and self._gradient_dtype is None
        if is_kept and kept.guests:
            held = {id(original): part for part, original in kept.guests}
            return [held.get(id(slot.original)) for slot in slots]
        pieces = own_pieces(group)
        parts: list[torch.Tensor | None] = [None] * len(slots)
        for index, piece in pieces.items():
            line = reduced[piece.offset : piece.offset + piece.numel]
            shaped = line.view(slots[index].original.shape).detach()
            parts[index] = part_of(shaped, slots[index].original, slots[index].name)
        if is_kept:
            mine = zip(parts, slots, strict=True)
            kept.guests = [(p, slot.original) for p, slot in mine if p is not None]
        return parts

    def refresh(self, unit: Unit) -> None:
        """Take over tensors that users have set with ``.data`` or assigned as parameters."""
        for slot, target in self._targets:
            for module, name in slot.places:
                held = module._parameters.get(name)
                if held is not slot.original and held is not slot.full:
                    self._follow(unit, slot)
            original = slot.original
            if original.data_ptr() != target.data_ptr() or original.shape != target.shape:
                write_back(original, target, slot.name)
                self._refusals.add(unit, original, [slot], slot.name)

    def _follow(self, unit: Unit, slot: Slot) -> None:
        """Take over a parameter that the user assigned at one use of ``slot``, at all its uses.

        Raises RuntimeError for anything else.
        """
        new: nn.Parameter | None = None
        for module, name in slot.places:
            found = module._parameters.get(name)
            if found is slot.original or found is slot.full:
                continue
            if found is new and found is not None:
                continue
            is_users = isinstance(found, nn.Parameter) and not hasattr(found, TAKEN)
            if new is not None or not is_users or lent_now() is not None:
                raise replaced(slot.name, module, found, slot.leaf.shape, unit.communicators)
            new = found
        if new is None:
            return
        before, slot.original = slot.original, new
        before.data = before.data.clone()  # whoever holds it keeps it
        setattr(new, TAKEN, getattr(before, TAKEN))
        group = next(group for group in unit.groups if slot in group.slots)
        group.kept.forget()
        mark_pieces(new, group, [slot], is_line=False)
        slot.show(new)
        unit.reshard()

    def convert(self, unit: Unit) -> None:
        if all(
            slot.original.data_ptr() == target.data_ptr() and slot.original.dtype == target.dtype
            for slot, target in self._targets
        ):
            return
        for group in unit.groups:
            group.carry_starts([slot.original.data for slot in group.slots])
            first, shard = group.slots[0].original, group.buffer.shard
            if first.dtype != shard.dtype or first.device != shard.device:
                group.convert(first.dtype, first.device)
        self._point(unit, keep=True)
        unit.has_changed()

    @torch.no_grad()
    def _point(self, unit: Unit, *, keep: bool = False) -> None:
        """Make each original a view of the shard; ``keep`` copies its current values there."""
        self._targets = []
        for group in unit.groups:
            for slot in group.slots:
                mark_pieces(slot.original, group, [slot], is_line=False)
        for slot, target in places_in_shards(unit.groups):
            if keep:
                target.copy_(slot.original.data)
            slot.original.data = target
            self._targets.append((slot, target))
            self._refusals.add(unit, slot.original, [slot], slot.name)
