"""Builds a unit from modules: which parameters it has, where they are sharded, in which buffers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright import comm
from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import check_ties, is_dtensor, local_of
from meshwright.comm.dtensors.exchanging import exchanged_over
from meshwright.comm.dtensors.subclasses import values_of
from meshwright.data_parallel.checks.forward_writes import refuse_frequencies
from meshwright.data_parallel.checks.starting_state import is_of_one_rank, synchronize
from meshwright.data_parallel.distributed_parameters import local_parameters
from meshwright.data_parallel.sharded_modules.module_hooks import Driver, driver_of
from meshwright.data_parallel.sharded_modules.module_tree import STATES
from meshwright.data_parallel.shards.buffer import ALONE, BufferTypes, DataAxes
from meshwright.data_parallel.shards.dtensor_exposure import ExposedTensors
from meshwright.data_parallel.shards.parameter_group import ParameterGroup, UnitSettings
from meshwright.data_parallel.shards.placement import Place, PlacementChoice, Target, place
from meshwright.data_parallel.shards.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from meshwright.data_parallel.shards.replaced_parameters import (
    is_ours_alone,
    refuse_views,
    retire_sharded,
)
from meshwright.data_parallel.shards.slot import (
    HOME,
    Slot,
    carry_hooks,
    collect_slots,
    group_slots,
)
from meshwright.data_parallel.shards.tensor_extensions import (
    PLAIN,
    Extension,
    check_gradient_dtype,
    extension_of,
    whole_parameter,
)
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import InternalError, warn
from meshwright.layout import FlatLayout, Replicate
from meshwright.mesh import DeviceMesh

MUCH_PADDING = 0.10
"""Elements of padding for each element, from which a unit's shape is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The options of one call of `fully_shard`."""

    target: Target
    reshard_after_forward: bool | int | None = None
    placement_of: PlacementChoice | None = None
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored: frozenset[int] = frozenset()


def build_unit(
    modules: Sequence[nn.Module],
    below: UnitModules,
    options: ShardOptions,
    *,
    synchronizes: bool,
) -> Unit | None:
    """Make the unit of all parameters of ``modules`` that no other call has taken, if any.

    ``below`` is the result of `below`. With ``synchronizes`` the first rank's values are used.
    """
    own, collected = below.own, collect_slots(below.own)
    for module in modules:
        check_ties(module, [slot.original for slot in collected])
    slots = [slot for slot in collected if id(slot.original) not in options.ignored]
    if any(is_dtensor(slot.original) for slot in slots):
        local = {key: each for part in modules for key, each in local_parameters(part).items()}
        for slot in slots:
            slot.computes = local.get(id(slot.original), slot.computes)
    if slots and options.target.axes.size > 1:
        parts = [part for _, part in own]
        refuse_frequencies(parts, [(slot.name, slot.original) for slot in slots])
    _move_buffers(own, options)
    slots, moved = settle(modules, below.drivers, slots)
    _check_parameters(slots)
    refuse_views((part for _, part in own), slots)
    known: dict[tuple[int, ...], Place] = {}
    for slot in slots:
        at = _place(slot, options, known)
        slot.place, slot.outer, slot.extension = at, at.outer, _extension(slot, at, options)
    if synchronizes:
        _synchronize(own, slots, options)
    compared = () if synchronizes else dict.fromkeys(slots)
    slots += moved
    if not slots:
        return None
    groups = [_group(members, options) for members in _together(slots)]
    block = _block(options)
    if block is not None and any(group.axes.exchange is not None for group in groups):
        raise ValueError(
            f"reshard_after_forward={options.reshard_after_forward} keeps parameters among "
            f"{block.size} ranks, and {slots[0].name!r} is in a unit with experts, which other "
            "ranks hold: pass True or False"
        )
    for group in groups if compared else ():
        group.note_starts(compared)
    after = options.reshard_after_forward
    settings = UnitSettings(
        keep_full_after_forward=after is False or (after == 1 and after is not True),
        block=block,
        forward_prefetch=True,
    )
    name = slots[0].names[0].rpartition(".")[0] or type(modules[0]).__name__
    return Unit(name, groups, ExposedTensors(), settings)


def _place(slot: Slot, options: ShardOptions, known: dict[tuple[int, ...], Place]) -> Place:
    """The placement of ``slot``; ``known`` caches those of plain parameters, by shape."""
    over = _exchanged_over(slot.name, slot.places)
    if options.placement_of is not None or over is not None or is_dtensor(slot.original):
        return place(slot.name, slot.original, options.target, options.placement_of, over)
    shape = tuple(slot.original.shape)
    if shape not in known:
        known[shape] = place(slot.name, slot.original, options.target, None)
    return known[shape]


def _exchanged_over(name: str, places: Sequence[tuple[nn.Module, str]]) -> DeviceMesh | None:
    """The mesh over which modules that hold a parameter exchange samples; None if they do not.

    Raises ValueError where only some do: there its gradient would be a sum over that mesh already.
    """
    first, *others = [exchanged_over(module) for module, _ in places]
    if any(other != first for other in others):
        raise ValueError(
            f"parameter {name!r} is tied, and some of the modules that hold it exchange samples "
            f"over {next(each for each in (first, *others) if each is not None)}, where its "
            "gradient is summed, and others do not, or over another mesh: untie it"
        )
    return first


def experts_axes(slots: Iterable[Slot]) -> dict[nn.Module, DataAxes]:
    """The axes of the modules that exchange samples, by those of their parameters."""
    placed = [(slot, slot.place.axes) for slot in slots if slot.place is not None]
    held = ((part, axes) for slot, axes in placed for part, _ in slot.places)
    return {part: axes for part, axes in held if axes.exchange is not None}


def on_one_mesh(drivers: Iterable[Driver]) -> None:
    """Put parameters that tensor parallelism did not shard on the mesh of those that it did.

    They are replicated there. torch's functions on lists of DTensors, such as clipping and
    ``foreach`` optimizers, accept one mesh only. Where the units of ``drivers`` have several meshes
    beside the same data axes, the choice would be ambiguous, and nothing is done.
    """
    units = [driver.unit for driver in drivers if driver.unit is not None]
    groups = [group for unit in units for group in unit.groups]
    if not any(group.has_outer for group in groups):
        return
    slots = [slot for group in groups for slot in group.slots]
    placed = [(slot, slot.place) for slot in slots if slot.place is not None]
    meshes: dict[DataAxes, set[DeviceMesh]] = {}
    for slot, at in placed:
        if slot.outer is not None:
            meshes.setdefault(at.axes, set()).add(at.mesh)
    for slot, at in placed:
        known = meshes.get(at.axes, ())
        if slot.outer is None and len(known) == 1:
            (mesh,) = known
            others = [Replicate()] * (mesh.ndim - at.mesh.ndim)
            slot.place = replace(at, mesh=mesh, placements=(*at.placements, *others))
    for unit in units:
        unit.exposure.follow_places()


def _synchronize(
    own: Iterable[tuple[str, nn.Module]], slots: Iterable[Slot], options: ShardOptions
) -> None:
    """Give all ranks the parameters and buffers of the first."""
    slots = list(slots)
    data, experts = options.target.axes, experts_axes(slots)
    by_axes: dict[DataAxes, list[tuple[str, torch.Tensor]]] = {data: []}
    for slot in slots:
        axes = data if slot.place is None else slot.place.axes
        by_axes.setdefault(axes, []).append((slot.name, values_of(slot.original)))
    for path, module in own:
        if not is_of_one_rank(module, options.ignored):
            named = module.named_buffers(path, recurse=False)
            known = by_axes.setdefault(experts.get(module, data), [])
            known += [(name, buffer) for name, buffer in named]
    for axes, tensors in by_axes.items():
        synchronize(tensors, axes.shard, axes.replicate)


def _move_buffers(own: Iterable[tuple[str, nn.Module]], options: ShardOptions) -> None:
    """Move the buffers of modules to the device that the modules will compute on."""
    device = _device_of(options.target)
    for _, module in own:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _extension(slot: Slot, place: Place, options: ShardOptions) -> Extension | None:
    """The extension of ``slot``, if a subclass defines one; raises for what would be lost."""
    check_gradient_dtype(slot.name, slot.original)
    if type(slot.original) in PLAIN:
        return None
    mesh, shard = place.mesh, place.axes.shard
    over = mesh if mesh.ndim == 1 else None
    if shard is not None and shard.axis in (mesh.mesh_dim_names or ()):
        over = mesh[shard.axis]
    module, _ = slot.places[0]
    found = extension_of(slot.name, slot.original, over, module, options.precision)
    if found is None:
        return None
    after = options.reshard_after_forward
    is_spread = after is not True and after is not None and 1 < after < place.axes.parts
    if place.dim or is_spread:
        why = "cut along another dim than 0" if place.dim else "spread among some ranks"
        raise NotImplementedError(
            f"parameter {slot.name!r} is a {type(slot.original).__name__}, a tensor subclass that "
            f"says how it is gathered, and cannot be {why}: shard it along dim 0, and with "
            "reshard_after_forward True or False"
        )
    return found


def _together(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Group slots on the same axes that can share a buffer."""
    on_axes: dict[Any, list[Slot]] = {}
    for slot in slots:
        axes = slot.place and slot.place.axes
        on_axes.setdefault((axes, slot.extension is not None), []).append(slot)
    return [members for same in on_axes.values() for members in group_slots(same)]


def _block(options: ShardOptions) -> Communicator | None:
    """Make the group of ranks that keep full parameters after a forward, if one was requested."""
    after, shard = options.reshard_after_forward, options.target.axes.shard
    if shard is None or after is None or isinstance(after, bool) or not 1 < after < shard.size:
        return None
    first = shard.rank - shard.rank % after
    return comm.peers(shard, shard.ranks[first : first + after], f"{shard.axis} block")


def _group(slots: Sequence[Slot], options: ShardOptions) -> ParameterGroup:
    # Large ones last: these are gathered by themselves.
    slots = sorted(slots, key=lambda slot: _largest_part(slot) * slot.original.itemsize >= ALONE)
    places = [slot.place for slot in slots if slot.place is not None]
    axes, dtype = places[0].axes, slots[0].original.dtype
    layout = FlatLayout.chunked(
        [slot.name for slot in slots],
        [tuple(local_of(slot.original).shape) for slot in slots],
        str(dtype).removeprefix("torch."),
        axes.parts,
        dims=[each.dim for each in places],
    )
    if layout.padding > MUCH_PADDING and layout.numel * dtype.itemsize > 2**20:
        warn(
            f"sharding {slots[0].name!r} and {len(slots) - 1} more over {axes.parts} ranks along "
            f"their dims adds {layout.padding:.0%} padding. Give fully_shard a shard_placement_fn "
            "that chooses a dim which the number of ranks divides"
        )
    precision, device = options.precision, _device(slots[0], options.target)
    types = BufferTypes.of(dtype, precision.param_dtype, precision.reduce_dtype)
    if isinstance(options.offload, CPUOffloadPolicy):
        home = torch.device("meta" if slots[0].original.is_meta else "cpu")
        device, pins = _device_of(options.target), options.offload.pin_memory
        return ParameterGroup(slots, layout, axes, types, device, home, pin_memory=pins)
    return ParameterGroup(slots, layout, axes, types, device)


def _largest_part(slot: Slot) -> int:
    """Elements of a slot on a rank, by a number that ranks with other experts share."""
    place = slot.place
    if place is None or place.axes.exchange is None:
        return local_of(slot.original).numel()
    return -(-math.prod(place.shape) // place.axes.exchange.size)


def _device(slot: Slot, target: Target) -> torch.device:
    """The device a parameter computes on: meta until it is materialized elsewhere."""
    return slot.original.device if slot.original.is_meta else _device_of(target)


def _device_of(target: Target) -> torch.device:
    device = target.axes.communicators[0].device
    return device if device.type == target.mesh.device_type else torch.device("cpu")


class UnitModules(NamedTuple):
    """The modules that are about to form a unit, and all below them."""

    own: list[tuple[str, nn.Module]]
    """The modules that no other call has taken, each once, with their names."""
    drivers: list[Driver]
    """The drivers of modules that an earlier call has taken."""


def below(modules: Sequence[nn.Module]) -> UnitModules:
    """Collect ``modules`` and all modules below them, in one walk."""
    own: list[tuple[str, nn.Module]] = []
    taken: list[nn.Module] = []
    seen: set[int] = set()
    for number, root in enumerate(modules):
        # Names become those in the whole model when it runs for the first time.
        stack = [(str(number) if len(modules) > 1 else "", root)]
        while stack:
            name, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            own.append((name, module))
            children: list[tuple[str, nn.Module]] = []
            for key, child in module._modules.items():
                if child is None:
                    continue
                if is_taken(child):
                    taken.append(child)
                else:
                    children.append((f"{name}.{key}" if name else key, child))
            stack += reversed(children)
    drivers: dict[Driver, None] = {}
    taken.reverse()
    while taken:
        module = taken.pop()
        if id(module) not in seen:
            seen.add(id(module))
            driver = driver_of(module)
            if driver is not None:
                drivers[driver] = None
            inner = [child for child in module._modules.values() if child is not None]
            taken += reversed(inner)
    return UnitModules(own, [*drivers])


def is_taken(module: nn.Module) -> bool:
    """Whether a composable function has been applied to ``module``."""
    return bool(module.__dict__.get(STATES))


def _check_parameters(slots: Iterable[Slot]) -> None:
    for slot in slots:
        parameter = local_of(slot.original)
        if parameter.ndim == 0:
            raise ValueError(
                "fully_shard doesn't support scalar parameters. Change "
                f"{slot.name} to a 1D tensor with numel equal to 1."
            )
        if not parameter.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters: {slot.name} has shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}. Make it contiguous"
            )


# ------------------------------------------------------ parameters that several units use

# Units are made from the inside out, so a unit may find out later that one of its parameters is
# used elsewhere. Until a unit around all uses is made the parameter is *spread*: it stays where it
# is and looks alike everywhere. Then it moves there.


def remember(driver: Driver) -> None:
    """Mark the parameters that the unit of ``driver`` has taken over, and release them."""
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
    """Separate the parameters of a new unit of ``modules`` from those of inner units.

    Returns two lists. The first has the ``slots`` that no inner unit holds. The second has slots
    that inner units give up, because modules of the new unit use them too. Other ``slots`` add
    their names and places to the inner unit's slot. ``drivers`` drive the inner units.

    A slot that was given up has this rank's chunk in ``slot.local``; ``slot.original`` has only
    the shape. Raises ValueError if only one of two tied modules computes on a local tensor.
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
        _exchanged_over(slot.name, [theirs.places[0], *(where for _, where in new)])
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
        start=slot.start,
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
    """Make ``group`` without one slot: the other chunks are unchanged, in a new buffer."""
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
