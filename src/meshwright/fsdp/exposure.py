"""How the parameters of a unit look from outside: one flat shard, or the original parameters.

While a unit is gathered its whole parameters are plain attributes of the modules, which Python
finds before the registered ones. So ``parameters()`` lists the same objects at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.after_hooks import run_after_hooks
from meshwright.comm.gradient_part import plain_gradient
from meshwright.data_parallel.parameter_hooks import has_hooks
from meshwright.data_parallel.replaced_parameters import (
    check_given,
    is_given_for_call,
    rank_in,
    replaced,
)
from meshwright.data_parallel.unit import Exposure, ParameterGroup, Slot, Unit
from meshwright.errors import InternalError
from meshwright.fsdp.direct_gradients import Refusals
from meshwright.fsdp.pieces import (
    change_piece_by_hooks,
    cuts_of,
    give_gradient,
    mark_pieces,
    own_pieces,
    part_of,
    places_in_shards,
    write_back,
)

__all__ = [
    "FLAT",
    "TAKEN",
    "Exposed",
    "FlatExposure",
    "FlatParameter",
    "OriginalExposure",
    "exposed_of",
    "gradients_by_axes",
    "hide_full",
]

FLAT = "_flat_param"
"""The name under which a unit's flat parameter is registered."""


TAKEN = "_meshwright_unit_name"
"""An attribute of parameters that a unit has taken over."""


class FlatParameter(nn.Parameter):
    """All parameters of one unit in one line, of which this rank holds its shard."""

    _meshwright_unit_name = FLAT
    """It belongs to a unit, so no other unit takes it over."""


class Exposed(Exposure, Protocol):
    """An exposure whose tensors an optimizer may hold."""

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """What the optimizer sees of ``unit``."""
        ...

    def registered(self, unit: Unit) -> list[torch.Tensor]:
        """What modules hold now in the places of those."""
        ...

    def version(self, unit: Unit) -> int:
        """A number that grows when a parameter is written in place."""
        ...

    def is_stale(self, unit: Unit) -> bool:
        """Whether a parameter was written in place after it was gathered."""
        ...

    def is_replaced(self, unit: Unit) -> bool:
        """Whether a parameter has other memory than its place in the shard, or is another one."""
        ...

    def convert(self, unit: Unit) -> None:
        """Rebuild buffers from exposed tensors that ``.to`` or ``.half`` has replaced."""
        ...


def exposed_of(unit: Unit) -> FlatExposure | OriginalExposure:
    """How ``unit`` looks from outside."""
    exposure = unit.exposure
    if not isinstance(exposure, FlatExposure | OriginalExposure):
        raise InternalError(f"unit {unit.name!r} does not belong to the facade")
    return exposure


def hide_full(slots: Sequence[Slot]) -> None:
    """Take whole parameters out of the modules."""
    for slot in slots:
        for module, name in slot.places:
            module.__dict__.pop(name, None)


class FlatExposure:
    """One flat parameter on the wrapped module; while sharded the modules hold empty tensors."""

    def __init__(self, owner: nn.Module, gradient_dtype: torch.dtype | None = None) -> None:
        self.owner = owner
        """The module that holds the flat parameter."""
        self._gradient_dtype = gradient_dtype
        self._seen = -1
        self._flat: FlatParameter | None = None
        self._nothing = torch.empty(0)
        """What modules hold while the unit is sharded. Nobody else should change it."""
        self._nothing_trains = False
        self._shows_full = False
        self._refusals = Refusals()

    def _only_group(self, unit: Unit) -> ParameterGroup:
        (group,) = unit.groups
        return group

    def _take_over(self, unit: Unit) -> FlatParameter:
        group = self._only_group(unit)
        trains = group.slots[0].original.requires_grad
        flat = FlatParameter(group.buffer.shard, requires_grad=trains)
        mark_pieces(flat, group, group.slots, is_line=True)
        for slot in group.slots:
            for module, name in slot.places:
                module._parameters.pop(name, None)
        self.owner.register_parameter(FLAT, flat)
        return flat

    @property
    def flat(self) -> FlatParameter:
        """The exposed parameter."""
        if self._flat is None:
            raise InternalError("a flat parameter was asked for before its unit was built")
        return self._flat

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """The flat parameter."""
        return [self.flat]

    def registered(self, unit: Unit) -> list[torch.Tensor]:
        """See `Exposed`."""
        held = self.owner._parameters.get(FLAT)
        return [self.flat if held is None else held]

    def show_sharded(self, unit: Unit) -> None:
        """See `Exposure`."""
        if self._flat is None:
            self._flat = self._take_over(unit)
            self._refusals.add(unit, self._flat, unit.slots, FLAT)
        else:
            self._find(unit)
        self.show_nothing(unit)

    def show_nothing(self, unit: Unit) -> None:
        """Give modules empty tensors, unless they hold what computes for one call."""
        before, flat, self._shows_full = self._nothing, self.flat, False
        kind = flat.dtype, flat.device, flat.requires_grad
        if (before.dtype, before.device, self._nothing_trains) != kind:
            self._nothing = flat.data[:0].requires_grad_(flat.requires_grad)
            self._nothing_trains = flat.requires_grad
            self._refusals.add(unit, self._nothing, unit.slots, "")
        for slot in unit.slots:
            for module, name in slot.places:
                found = module.__dict__.get(name)
                if found is None or found is before or found is slot.full:
                    # Modules look at them also where they do not compute, to be printed.
                    module.__dict__[name] = self._nothing

    def show_full(self, unit: Unit) -> bool:
        """See `Exposure`."""
        self._seen = self.version(unit)
        is_all, self._shows_full = self._find(unit), True
        for slot in unit.slots:
            full = slot.full
            if full.requires_grad != self.flat.requires_grad:
                full.requires_grad_(self.flat.requires_grad)
            for module, name in slot.places:
                if module.__dict__.get(name) is self._nothing:
                    module.__dict__[name] = full
        return is_all

    def _find(self, unit: Unit) -> bool:
        """Look whether modules hold what they were shown; False where one does for a call only.

        Raises RuntimeError for anything else.
        """
        is_all = True
        for slot in unit.slots:
            shown = slot.full if self._shows_full else self._nothing
            for module, name in slot.places:
                found = module.__dict__.get(name)
                if found is shown or found is self._nothing:
                    continue
                if found is None:
                    found = module._parameters.get(name)
                    if found is self._nothing:  # what `functional_call` puts back after a parameter
                        module.__dict__[name] = module._parameters.pop(name)
                        continue
                if found is not slot.full:
                    check_given(slot, module, found, unit.communicators)
                    is_all = False
        return is_all

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        """See `Exposure`."""
        return [self.flat.requires_grad] * len(group.slots)

    def has_gradients(self, unit: Unit) -> bool:
        """See `Exposure`."""
        return self.flat.grad is not None and self.flat.numel() > 0

    def is_stale(self, unit: Unit) -> bool:
        """See `Exposed`."""
        return self._seen != self.version(unit)

    def is_replaced(self, unit: Unit) -> bool:
        """See `Exposed`."""
        flat = self.flat
        is_held = self.owner._parameters.get(FLAT) is flat
        return not is_held or flat.data_ptr() != self._only_group(unit).buffer.shard.data_ptr()

    def version(self, unit: Unit) -> int:
        """See `Exposed`."""
        return self._only_group(unit).buffer.shard._version

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """See `Exposure`. What had no gradient anywhere gets zeros: there is only one ``.grad``."""
        flat = self.flat
        change_piece_by_hooks(group, flat, reduced, FLAT)
        if flat.grad is None:
            give_gradient(flat, part_of(reduced, flat, FLAT), self._gradient_dtype)
        else:
            flat.grad.add_(reduced)
        run_after_hooks(flat)

    def refresh(self, unit: Unit) -> None:
        """Take over a line that the user has set with ``.data``."""
        flat, shard = self.flat, self._only_group(unit).buffer.shard
        self._find(unit)
        nothing = self._nothing
        if nothing.numel() or nothing.requires_grad is not self._nothing_trains:
            raise RuntimeError(
                f"rank {rank_in(unit.communicators)}: a parameter of unit {unit.name!r} was "
                "changed by itself (.data, requires_grad_, swap_tensors), and is a part of one "
                "flat parameter: set use_orig_params=True, or change it in summon_full_params"
            )
        held = self.owner._parameters.get(FLAT)
        if held is not flat:
            raise replaced(FLAT, self.owner, held, flat.shape, unit.communicators)
        if flat.data_ptr() != shard.data_ptr():
            write_back(flat, shard, FLAT)

    def convert(self, unit: Unit) -> None:
        """See `Exposed`."""
        flat, group = self.flat, self._only_group(unit)
        shard = group.buffer.shard
        if flat.shape == shard.shape:
            group.carry_starts([group.buffer.own(n, flat.data) for n in range(len(group.slots))])
        if flat.dtype != shard.dtype or flat.device != shard.device:
            group.convert(flat.dtype, flat.device)
            shard = group.buffer.shard
        if flat.data_ptr() != shard.data_ptr():
            shard.copy_(flat.data)
            flat.data = shard
            self._refusals.add(unit, flat, unit.slots, FLAT)
            unit.has_changed()


class OriginalExposure:
    """The original parameter objects, each holding this rank's piece as a 1-D tensor.

    Where nothing is sharded they keep their shapes.
    """

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        self._gradient_dtype = gradient_dtype
        self._targets: list[tuple[Slot, torch.Tensor]] = []
        """Each parameter, and its place in the shard."""
        self._seen = -1
        self._refusals = Refusals()

    def parameters(self, unit: Unit) -> list[nn.Parameter]:
        """The original parameters."""
        return [slot.original for slot in unit.slots]

    def registered(self, unit: Unit) -> list[torch.Tensor]:
        """See `Exposed`."""
        places = [(slot, *slot.places[0]) for slot in unit.slots]
        held = [(slot, module._parameters.get(name)) for slot, module, name in places]
        return [slot.original if tensor is None else tensor for slot, tensor in held]

    def show_sharded(self, unit: Unit) -> None:
        """See `Exposure`."""
        if not self._targets:
            self._point(unit)
        for slot in unit.slots:
            for module, name in slot.places:
                found = module._parameters.get(name)
                if found is not slot.original:
                    check_given(slot, module, found, unit.communicators)
        hide_full(unit.slots)

    def show_full(self, unit: Unit) -> bool:
        """See `Exposure`."""
        self._seen = self.version(unit)
        is_all = True
        for slot in unit.slots:
            full, original = slot.full, slot.original
            if full.requires_grad != original.requires_grad:
                full.requires_grad_(original.requires_grad)
            for module, name in slot.places:
                found = module._parameters.get(name)
                if found is original:
                    module.__dict__[name] = full
                else:
                    check_given(slot, module, found, unit.communicators)
                    is_all = False
        return is_all

    def trains(self, unit: Unit, group: ParameterGroup) -> list[bool]:
        """See `Exposure`."""
        return [slot.original.requires_grad for slot in group.slots]

    def has_gradients(self, unit: Unit) -> bool:
        """See `Exposure`. A parameter without elements here never has a gradient."""
        return any(slot.original.grad is not None for slot in unit.slots)

    def is_stale(self, unit: Unit) -> bool:
        """See `Exposed`."""
        return self._seen != self.version(unit)

    def is_replaced(self, unit: Unit) -> bool:
        """See `Exposed`."""
        for slot, target in self._targets:
            module, name = slot.places[0]
            original = slot.original
            if module._parameters.get(name) is not original or (
                original.data_ptr() != target.data_ptr()
            ):
                return True
        return False

    def version(self, unit: Unit) -> int:
        """See `Exposed`."""
        # The originals have counters of their own: the shard's does not see what they are given.
        return sum(slot.original._version for slot in unit.slots)

    def set_gradients(
        self, unit: Unit, group: ParameterGroup, reduced: torch.Tensor, used: Sequence[bool]
    ) -> None:
        """See `Exposure`. A parameter without elements here, or used nowhere, gets none."""
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

    def _on(self, group: ParameterGroup, reduced: torch.Tensor) -> list[torch.Tensor | None]:
        """Take each parameter's part of ``reduced``; None for one without elements on this rank.

        Where that is memory which is kept from step to step, so are they.
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
        """Take over tensors that the user has set with ``.data`` or put in place of parameters."""
        for slot, target in self._targets:
            for module, name in slot.places:
                held = module._parameters.get(name)
                if held is not slot.original:
                    self._follow(unit, slot)
            original = slot.original
            if original.data_ptr() != target.data_ptr() or original.shape != target.shape:
                write_back(original, target, slot.name)
                self._refusals.add(unit, original, [slot], slot.name)

    def _follow(self, unit: Unit, slot: Slot) -> None:
        """Take over a parameter of the user's that is in one place of ``slot``, in all its places.

        Raises RuntimeError for anything else, unless it computes there for one call.
        """
        is_given = is_given_for_call()
        new: nn.Parameter | None = None
        for module, name in slot.places:
            found = module._parameters.get(name)
            if found is slot.original or (found is new and found is not None):
                continue
            is_users = isinstance(found, nn.Parameter) and not hasattr(found, TAKEN)
            if is_given or new is not None or not is_users:
                check_given(slot, module, found, unit.communicators)
            else:
                new = found
        if new is None:
            return
        before, slot.original = slot.original, new
        before.data = before.data.clone()  # whoever holds it keeps it
        setattr(new, TAKEN, getattr(before, TAKEN))
        group = next(group for group in unit.groups if slot in group.slots)
        group.kept.forget()
        mark_pieces(new, group, [slot], is_line=False)
        for module, name in slot.places:
            module._parameters[name] = new

    def convert(self, unit: Unit) -> None:
        """See `Exposed`."""
        if all(_is_same(slot.original, target) for slot, target in self._targets):
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
        """Let each original look into the shard; ``keep`` what it holds now."""
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


def gradients_by_axes(
    unit: Unit,
) -> Iterator[tuple[tuple[Communicator, ...], list[torch.Tensor]]]:
    """This rank's gradients, by the axes they lie spread over: the same ones on all ranks."""
    exposure = exposed_of(unit)
    for group in unit.groups:
        pieces = own_pieces(group)
        line = plain_gradient(exposure.flat) if isinstance(exposure, FlatExposure) else None
        if line is not None and len(cuts_of(group, group.slots)) == 1:
            yield from ((axes, [line]) for axes in cuts_of(group, group.slots))
            continue
        for index, slot in enumerate(group.slots):
            piece, own = pieces.get(index), plain_gradient(slot.original)
            if isinstance(exposure, FlatExposure):
                own = None
                if line is not None and piece is not None:
                    own = line[piece.offset : piece.offset + piece.numel]
            (axes,) = cuts_of(group, [slot])
            yield axes, [] if own is None else [own]


def _is_same(parameter: nn.Parameter, target: torch.Tensor) -> bool:
    return parameter.data_ptr() == target.data_ptr() and parameter.dtype == target.dtype
