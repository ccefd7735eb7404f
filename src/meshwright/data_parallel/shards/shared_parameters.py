"""Parameters that modules of several units share: they belong to the lowest unit that holds all.

Units are made from the inside out, so a unit may find out later that one of its parameters is used
elsewhere. Until a unit around all uses is made the parameter is *spread*: it stays where it is and
looks alike everywhere. Then it moves there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import local_of
from meshwright.data_parallel.sharded_modules.module_hooks import Driver
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.parameter_hooks import carry_hooks
from meshwright.data_parallel.shards.replaced_parameters import is_ours_alone, retire_sharded
from meshwright.data_parallel.shards.slot import HOME, Slot
from meshwright.data_parallel.shards.tensor_extensions import whole_parameter
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import InternalError
from meshwright.layout import FlatLayout


def remember(driver: Driver) -> None:
    """Mark the parameters that the unit of ``driver`` has taken over, and let go of them."""
    unit = driver.unit
    if unit is None:
        return
    home = weakref.ref(driver)
    for slot, shown in zip(unit.slots, unit.exposure.parameters(unit), strict=True):
        # The parameter may live on in another module; its unit must not keep it alive.
        shown.__dict__[HOME] = me = weakref.ref(slot)
        before, slot.original = slot.original, slot.full
        if not is_ours_alone(before):
            before.__dict__[HOME] = me
            retire_sharded(before, slot.name)
        del before  # or `forget_gone` would find it held
        slot.home = home
        slot.forget_gone()


def settle(
    modules: Sequence[nn.Module], drivers: Iterable[Driver], slots: Iterable[Slot]
) -> tuple[list[Slot], list[Slot]]:
    """Sort ``slots`` into those that a new unit of ``modules`` takes and those from units inside.

    These are the units of ``drivers``. The local values of the latter are on ``slot.original``, in
    the shape of this rank's chunk.
    """
    own: list[Slot] = []
    for slot in slots:
        held = slot.original.__dict__.get(HOME)
        theirs: Slot | None = None if held is None else held()
        driver: Driver | None = None if theirs is None else theirs.driver
        if theirs is None or driver is None or driver.unit is None:
            own.append(slot)
            continue
        new = [
            pair
            for pair in zip(slot.names, slot.places, strict=True)
            if pair[1] not in theirs.places
        ]
        if not new:
            continue
        if slot.computes.is_local is not theirs.computes.is_local:
            raise ValueError(
                f"{slot.name!r} is tied to {theirs.name!r}, and only one of them computes on a "
                "local tensor: give both modules styles of meshwright.tensor_parallel, or neither"
            )
        theirs.names += tuple(name for name, _ in new)
        theirs.places += tuple(where for _, where in new)
        theirs.is_spread = True
        driver.unit.exposure.forget_places()
        driver.unit.exposure.show_sharded(driver.unit)
    units = ((driver, driver.unit) for driver in drivers if driver.unit is not None)
    spread = [
        (driver, slot)
        for driver, unit in units
        for group in unit.groups
        for slot in group.slots
        if slot.is_spread
    ]
    if not spread:
        return own, []
    inside = {part for module in modules for part in module.modules()}
    inner = [each for each in spread if all(module in inside for module, _ in each[1].places)]
    return own, [_release(driver, slot) for driver, slot in inner]


def check_settled(unit: Unit) -> None:
    """Raise RuntimeError when a parameter is used outside of every unit that could hold it."""
    for slot in unit.slots:
        if slot.is_spread:
            raise RuntimeError(
                f"parameter {slot.names[0]!r} is used as {', '.join(slot.names[1:])} too, in "
                "modules of different units, and no unit contains them all. Call fully_shard on a "
                "module that contains them, the whole model for example"
            )


def _release(driver: Driver, slot: Slot) -> Slot:
    """Take ``slot`` out of the unit of ``driver``, which keeps the rest."""
    unit = driver.unit
    if unit is None:
        raise InternalError(f"{slot.name!r} is not where it should be")
    groups: list[ParameterGroup] = []
    local: torch.Tensor | None = None
    for group in unit.groups:
        if slot not in group.slots:
            groups.append(group)
            continue
        index = group.slots.index(slot)
        local = group.buffer.local(index)
        if len(group.slots) > 1:
            groups.append(_without(group, index))
    if local is None:
        raise InternalError(f"{slot.name!r} is in no group of unit {unit.name!r}")
    shape = local_of(slot.full).shape
    driver.unit = Unit(unit.name, groups, unit.exposure, unit.settings) if groups else None
    moved = Slot(
        names=slot.names,
        places=slot.places,
        place=slot.place,
        outer=slot.outer,
        computes=slot.computes,
        given=slot.given,
        memory=slot.memory,
        starts=slot.starts,
        start_at=slot.start_at,
        extension=slot.extension,
        local=local.clone(),
        original=whole_parameter(
            torch.zeros((), dtype=local.dtype, device=local.device).expand(shape), slot.full
        ),
    )
    moved.original.__dict__.pop(HOME, None)
    carry_hooks(unit.exposure.shown(slot), moved.original, slot.name)
    return moved


def _without(group: ParameterGroup, index: int) -> ParameterGroup:
    """Make ``group`` without one slot: the other chunks are the same, in another line."""
    layout = group.buffer.layout.chunked_layout()
    kept = [number for number in range(len(group.slots)) if number != index]
    narrower = FlatLayout.chunked(
        [layout.names[number] for number in kept],
        [layout.shapes[number] for number in kept],
        layout.dtype,
        layout.parts,
        dims=[layout.dims[number] for number in kept],
    )
    slots = [group.slots[number] for number in kept]
    for number, slot in zip(kept, slots, strict=True):
        slot.local = group.buffer.local(number).clone()
    device, home, pins = group.buffer.device, group.home, group.pin_memory
    return ParameterGroup(slots, narrower, group.axes, group.types, device, home, pin_memory=pins)
