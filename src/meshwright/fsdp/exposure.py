"""How the parameters of a unit look from outside: one flat shard, or the original parameters.

While a unit is gathered its whole parameters are plain attributes of the modules, which Python
finds before the registered ones. So ``parameters()`` lists the same objects at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.after_hooks import run_after_hooks
from meshwright.comm.gradient_part import gradient_part, plain_gradient
from meshwright.comm.spread import is_marked_spread
from meshwright.data_parallel.distributed_parameters import cut_axes, mark_spread
from meshwright.data_parallel.parameter_hooks import change_by_hooks, has_hooks
from meshwright.data_parallel.unit import Exposure, ParameterGroup, Slot, Unit
from meshwright.errors import InternalError
from meshwright.layout import FlatLayout, Piece

__all__ = [
    "FLAT",
    "Exposed",
    "FlatExposure",
    "FlatParameter",
    "OriginalExposure",
    "exposed_of",
    "flat_layout",
    "gradients_by_axes",
    "hide_full",
    "own_pieces",
]

FLAT = "_flat_param"
"""The name under which a unit's flat parameter is registered."""


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

    def refresh(self, unit: Unit) -> None:
        """Take over what the user has put into the exposed tensors, before they are gathered."""
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


def flat_layout(group: ParameterGroup) -> FlatLayout:
    """The layout of a unit of the facade: it is always packed."""
    layout = group.buffer.layout
    if not isinstance(layout, FlatLayout):
        raise InternalError("a unit of the facade must be packed at any element")
    return layout


def own_pieces(group: ParameterGroup) -> dict[int, Piece]:
    """This rank's piece of each parameter that it has one of, by the parameter's index."""
    return {piece.index: piece for piece in flat_layout(group).owned(group.axes.part)}


def hide_full(slots: Sequence[Slot]) -> None:
    """Take whole parameters out of the modules."""
    for slot in slots:
        for module, name in slot.places:
            module.__dict__.pop(name, None)


def _show_full(slot: Slot, requires_grad: bool) -> None:
    full = slot.full
    if full.requires_grad != requires_grad:
        full.requires_grad_(requires_grad)
    for module, name in slot.places:
        module.__dict__[name] = full


class FlatExposure:
    """One flat parameter on the wrapped module; while sharded the modules hold empty tensors."""

    def __init__(self, owner: nn.Module, gradient_dtype: torch.dtype | None = None) -> None:
        self.owner = owner
        """The module that holds the flat parameter."""
        self._gradient_dtype = gradient_dtype
        self._seen = -1
        self._flat: FlatParameter | None = None

    def _only_group(self, unit: Unit) -> ParameterGroup:
        (group,) = unit.groups
        return group

    def _take_over(self, unit: Unit) -> FlatParameter:
        group = self._only_group(unit)
        trains = group.slots[0].original.requires_grad
        flat = FlatParameter(group.buffer.shard, requires_grad=trains)
        _mark(flat, group, group.slots)
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
        nothing = self._flat.data[:0]
        for slot in unit.slots:
            for module, name in slot.places:
                # Modules look at their parameters also where they do not compute, to be printed.
                module.__dict__[name] = nothing

    def show_full(self, unit: Unit) -> None:
        """See `Exposure`."""
        self._seen = self.version(unit)
        for slot in unit.slots:
            _show_full(slot, self.flat.requires_grad)

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
        _change_by_hooks(group, flat, reduced, FLAT)
        if flat.grad is None:
            _give_gradient(flat, _part(reduced, flat, FLAT), self._gradient_dtype)
        else:
            flat.grad.add_(reduced)
        run_after_hooks(flat)

    def refresh(self, unit: Unit) -> None:
        """Take over a line that the user has set with ``.data``."""
        flat, shard = self.flat, self._only_group(unit).buffer.shard
        if flat.data_ptr() != shard.data_ptr():
            _write_back(flat, shard, FLAT)

    def convert(self, unit: Unit) -> None:
        """See `Exposed`."""
        flat, group = self.flat, self._only_group(unit)
        shard = group.buffer.shard
        if flat.dtype != shard.dtype or flat.device != shard.device:
            group.convert(flat.dtype, flat.device)
            shard = group.buffer.shard
        if flat.data_ptr() != shard.data_ptr():
            shard.copy_(flat.data)
            flat.data = shard


class OriginalExposure:
    """The original parameter objects, each holding this rank's piece as a 1-D tensor.

    Where nothing is sharded they keep their shapes.
    """

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        self._gradient_dtype = gradient_dtype
        self._targets: list[tuple[Slot, torch.Tensor]] = []
        """Each parameter, and its place in the shard."""
        self._seen = -1

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
        hide_full(unit.slots)

    def show_full(self, unit: Unit) -> None:
        """See `Exposure`."""
        self._seen = self.version(unit)
        for slot in unit.slots:
            _show_full(slot, slot.original.requires_grad)

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
                _change_by_hooks(group, original, nothing, slot.name)
                hooked.append(original)
            if part is None:
                continue
            if original.grad is None:
                _give_gradient(original, part, self._gradient_dtype)
            else:
                original.grad.add_(part)
        for original in hooked:
            run_after_hooks(original)

    def _on(self, group: ParameterGroup, reduced: torch.Tensor) -> list[torch.Tensor | None]:
        """What ``reduced`` has of each parameter, None where this rank has no elements of one.

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
            parts[index] = _part(shaped, slots[index].original, slots[index].name)
        if is_kept:
            mine = zip(parts, slots, strict=True)
            kept.guests = [(p, slot.original) for p, slot in mine if p is not None]
        return parts

    def refresh(self, unit: Unit) -> None:
        """Take over tensors that the user has set with ``.data`` or put in place of parameters."""
        for slot, target in self._targets:
            module, name = slot.places[0]
            held = module._parameters.get(name)
            if held is not None and held is not slot.original:
                if held.shape == target.shape:
                    slot.original.data = held.data
                    self._hold(slot)
                else:
                    _write_back(held, target, slot.name)
            if slot.original.data_ptr() != target.data_ptr() or slot.original.shape != target.shape:
                _write_back(slot.original, target, slot.name)

    def convert(self, unit: Unit) -> None:
        """See `Exposed`."""
        if all(_is_same(slot.original, target) for slot, target in self._targets):
            return
        for group in unit.groups:
            first, shard = group.slots[0].original, group.buffer.shard
            if first.dtype != shard.dtype or first.device != shard.device:
                group.convert(first.dtype, first.device)
        self._point(unit, keep=True)

    def _hold(self, slot: Slot) -> None:
        for module, name in slot.places:
            module._parameters[name] = slot.original

    @torch.no_grad()
    def _point(self, unit: Unit, *, keep: bool = False) -> None:
        """Let each original look into the shard; ``keep`` what it holds now."""
        self._targets = []
        for group in unit.groups:
            for slot in group.slots:
                _mark(slot.original, group, [slot], is_line=False)
        for slot, target in _places_in_shards(unit.groups):
            if keep:
                target.copy_(slot.original.data)
            slot.original.data = target
            self._targets.append((slot, target))


def gradients_by_axes(
    unit: Unit,
) -> Iterator[tuple[tuple[Communicator, ...], list[torch.Tensor]]]:
    """This rank's gradients, by the axes they lie spread over: the same ones on all ranks."""
    exposure = exposed_of(unit)
    for group in unit.groups:
        pieces = own_pieces(group)
        line = plain_gradient(exposure.flat) if isinstance(exposure, FlatExposure) else None
        if line is not None and len(_cuts(group, group.slots)) == 1:
            yield from ((axes, [line]) for axes in _cuts(group, group.slots))
            continue
        for index, slot in enumerate(group.slots):
            piece, own = pieces.get(index), plain_gradient(slot.original)
            if isinstance(exposure, FlatExposure):
                own = None
                if line is not None and piece is not None:
                    own = line[piece.offset : piece.offset + piece.numel]
            (axes,) = _cuts(group, [slot])
            yield axes, [] if own is None else [own]


def _cuts(group: ParameterGroup, slots: Iterable[Slot]) -> set[tuple[Communicator, ...]]:
    """Over which axes the elements of ``slots`` lie spread."""
    return {cut_axes(slot.outer, group.axes.shard) for slot in slots}


def _mark(
    parameter: nn.Parameter, group: ParameterGroup, slots: Sequence[Slot], *, is_line: bool = True
) -> None:
    outers, name = [slot.outer for slot in slots], slots[0].name
    mark_spread(parameter, outers, group.axes.shard, name, is_line=is_line)


def _change_by_hooks(
    group: ParameterGroup, parameter: nn.Parameter, gradient: torch.Tensor, name: str
) -> None:
    """Let hooks on the gradient of ``parameter`` change it, unless this rank has a piece of it.

    Raises RuntimeError then: a hook that takes a norm, say, would go wrong without a word.
    """
    if not parameter._backward_hooks:
        return
    if group.axes.shard is not None:
        raise RuntimeError(
            f"{name!r} has a hook on its gradient, of which each rank holds one piece in a line "
            "without shape, so that the hook cannot do what it does in one process. Use "
            "fully_shard, whose hooks get DTensors, or register_post_accumulate_grad_hook, or "
            "change .grad between backward and step"
        )
    change_by_hooks(parameter, gradient, name)


def _give_gradient(
    parameter: nn.Parameter, gradient: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Set ``.grad``, perhaps in another dtype than the parameter's."""
    parameter.grad = gradient
    if dtype is not None and parameter.grad is not None:
        # Assigned as data: torch refuses gradients of another dtype, custom optimizers take them.
        parameter.grad.data = gradient.to(dtype)


def _part(gradient: torch.Tensor, parameter: nn.Parameter, name: str) -> torch.Tensor:
    return gradient_part(gradient, name) if is_marked_spread(parameter) else gradient


def _is_same(parameter: nn.Parameter, target: torch.Tensor) -> bool:
    return parameter.data_ptr() == target.data_ptr() and parameter.dtype == target.dtype


def _places_in_shards(
    groups: Sequence[ParameterGroup],
) -> Iterator[tuple[Slot, torch.Tensor]]:
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
def _write_back(parameter: nn.Parameter, target: torch.Tensor, name: str) -> None:
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
