"""Whole parameters outside of forward and backward: gathered, shown, and written back.

They are gathered into separate memory, in the optimizer's dtype, not the computation's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import dtensor_like, local_of
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.slot import Slot
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import warn
from meshwright.fsdp.exposures.exposure import (
    exposed_of,
    flat_layout,
)
from meshwright.fsdp.exposures.tensor_axes import as_parameter
from meshwright.fsdp.options import TrainingState
from meshwright.fsdp.states.named import (
    Part,
    by_group,
    cut_line,
    gather_line,
    join,
    parts_of,
)
from meshwright.torch_internals.modules import FLAT

if TYPE_CHECKING:
    from meshwright.fsdp.unit_wrapper import UnitWrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class SummonOptions:
    """How whole parameters are shown."""

    writes_back: bool = True
    rank0_only: bool = False
    offloads: bool = False
    with_gradients: bool = False


@contextlib.contextmanager
def summon_all(wrappers: Sequence[UnitWrapper], options: SummonOptions) -> Iterator[None]:
    """Show the whole parameters of all ``wrappers``."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(summon_own(wrapper, options))
        yield


@contextlib.contextmanager
def summon_own(wrapper: UnitWrapper, options: SummonOptions) -> Iterator[None]:
    """Show the whole parameters of the unit of ``wrapper``."""
    _check(wrapper, options)
    unit = wrapper._unit
    is_waiting = False
    shows = not options.rank0_only or wrapper.rank == 0
    wrapper._is_summoned, wrapper._shows_whole = True, shows
    try:
        if unit is None:
            yield
            return
        unit.reshard()
        exposed_of(unit).refresh(unit)
        is_waiting = exposed_of(unit).take_waiting(unit)
        lines = [gather_line(g, g.buffer.shard, f"summon {unit.name}") for g in unit.groups]
        if options.offloads:
            lines = [line.cpu() for line in lines]
        if not shows:
            yield
            return
        views = [
            view for g, line in zip(unit.groups, lines, strict=True) for view in cut_line(g, line)
        ]
        parts = parts_of(unit, wrapper._driver.own_names, wrapper._groups)
        gradients: list[torch.Tensor | None] | None = None
        if options.with_gradients:
            label = f"summon gradients of {unit.name}"
            groups = by_group(unit, parts)
            gradients = [whole for each in groups for whole in _whole_gradients(*each, label)]
        # What is not sharded is changed as such, by all ranks: nobody keeps another.
        is_whole = unit.groups[0].axes.shard is None and not wrapper._offloads
        writes_back = options.writes_back or (is_whole and not options.rank0_only)
        with _shown(unit, parts, views, lines[0], gradients, writes_back=writes_back):
            yield
        if not writes_back:
            return
        for group, line in zip(unit.groups, lines, strict=True):
            shard = group.buffer.shard
            mine = line.view(group.axes.parts, -1)[group.axes.part].to(shard.device)
            # Unchanged, it does not count as written: a backward may still be to come.
            if not torch.equal(mine, shard):
                with torch.no_grad():
                    shard.copy_(mine)
    finally:
        wrapper._is_summoned = wrapper._shows_whole = False
        if unit is not None and is_waiting:
            exposed_of(unit).show_waiting(unit)


def _check(wrapper: UnitWrapper, options: SummonOptions) -> None:
    """Reject arguments that exclude each other, and calls at times when nothing can be summoned."""
    state = wrapper.training_state
    if state is TrainingState.FORWARD_BACKWARD:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    if state is TrainingState.SUMMON_FULL_PARAMS:
        raise AssertionError(
            "Cannot manually unshard parameters when already unsharding parameters"
        )
    if options.writes_back and options.rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported yet: other ranks could not see "
            "what the first one writes"
        )
    if options.with_gradients and (options.offloads or not wrapper._use_orig_params):
        raise NotImplementedError(
            f"with_grads={options.with_gradients}, use_orig_params={wrapper._use_orig_params}, "
            f"offload_to_cpu={options.offloads} is not supported yet"
        )
    unit = wrapper._unit
    is_whole = unit is not None and unit.groups[0].axes.shard is None
    if options.offloads and is_whole:
        raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
    if options.offloads and not options.rank0_only:
        warn(
            "offload_to_cpu=True and rank0_only=False may result in redundant copies of whole "
            "parameters in the memory of one machine"
        )


@contextlib.contextmanager
def _shown(
    unit: Unit,
    parts: Sequence[Part],
    views: Sequence[torch.Tensor],
    line: torch.Tensor,
    gradients: Sequence[torch.Tensor | None] | None,
    *,
    writes_back: bool,
) -> Iterator[None]:
    """Put parameters with the values of ``views``, which are views of ``line``, into the modules.

    A flat parameter is ``line`` itself.
    """
    exposure = exposed_of(unit)
    owner, flat = exposure.owner, exposure.one_flat
    if owner is None or flat is None:
        with _originals_shown(parts, views, gradients, writes_back=writes_back):
            yield
        return
    del owner._parameters[FLAT]
    shard, (group,) = flat.data, unit.groups
    flat.data = line[: flat_layout(group).extent]
    for slot, view in zip(unit.slots, views, strict=True):
        slot.show(as_parameter(view, slot, requires_grad=flat.requires_grad))
        for module, name in slot.places:
            module.__dict__.pop(name, None)
    try:
        yield
    finally:
        for slot, view in zip(unit.slots, views, strict=True):
            for module, name in slot.places:
                shown = module._parameters.pop(name, None)
                if shown is not None and local_of(shown).data_ptr() != view.data_ptr():
                    view.copy_(local_of(shown.detach()))
        flat.data, owner._parameters[FLAT] = shard, flat
        exposure.show_nothing(unit)


@contextlib.contextmanager
def _originals_shown(
    parts: Sequence[Part],
    views: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    *,
    writes_back: bool,
) -> Iterator[None]:
    """Put ``views``, and whole gradients if any, into the original parameters."""
    slots = [part.group.slots[part.index] for part in parts]
    before = [(slot.original.data, slot.original.grad) for slot in slots]
    held: list[nn.Parameter] = []
    for index, (slot, view) in enumerate(zip(slots, views, strict=True)):
        original, gradient = slot.original, None if gradients is None else gradients[index]
        if slot.outer is None:
            original.grad, original.data = None, view
        else:
            original = as_parameter(view, slot, requires_grad=original.requires_grad)
            slot.show(original)
        if gradient is not None and original.requires_grad:
            original.grad = gradient if slot.outer is None else dtensor_like(gradient, original)
        held.append(original)
    try:
        yield
    finally:
        shown = [None if p.grad is None else local_of(p.grad) for p in held]
        for slot, view, parameter, (data, gradient) in zip(slots, views, held, before, strict=True):
            if local_of(parameter).data_ptr() != view.data_ptr():
                view.copy_(local_of(parameter.detach()))
            slot.original.grad = None
            slot.original.data = data
            _give_back(slot.original, gradient)
            if slot.outer is not None:
                slot.show(slot.original)
        if gradients is not None and writes_back:
            for each in zip(parts, slots, gradients, shown, strict=True):
                _write_gradient(*each)


def _give_back(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Restore ``.grad``, which may have another dtype than ``parameter``."""
    if gradient is None or gradient.dtype == parameter.dtype:
        parameter.grad = gradient
        return
    own = gradient.data
    gradient.data = own.to(parameter.dtype)  # torch refuses to assign another dtype
    parameter.grad = gradient
    gradient.data = own


@torch.no_grad()
def _write_gradient(
    part: Part, slot: Slot, before: torch.Tensor | None, whole: torch.Tensor | None
) -> None:
    """Store this rank's part of a whole gradient; a gradient that was deleted becomes None."""
    original = slot.original
    if whole is None and before is not None and original.requires_grad:
        original.grad = None
    if whole is None or part.piece is None:
        return
    own = whole.reshape(-1)[part.piece.start : part.piece.stop].view(original.shape)
    if original.grad is None:
        original.grad = own.clone()
    else:
        original.grad.copy_(own)


def _whole_gradients(
    group: ParameterGroup, parts: Sequence[Part], label: str
) -> list[torch.Tensor | None]:
    """Gather gradients; None if no rank has one, which optimizers distinguish from zeros."""
    gradients = [slot.original.grad for slot in group.slots]
    held = [gradient is not None for gradient in gradients]
    if group.axes.shard is not None:
        everyone = group.axes.shard.gather_numbers(held, label=label)
        held = [any(flags) for flags in zip(*everyone, strict=True)]
    line = join(parts, gradients, torch.zeros_like(group.buffer.shard))
    wholes = cut_line(group, gather_line(group, line, label))
    return [whole if is_held else None for whole, is_held in zip(wholes, held, strict=True)]
