"""Model state dicts of three kinds: whole tensors, parts that know the whole, flat shards.

::

    FULL      a gather per unit; plain tensors      loading sends nothing
    SHARDED   nothing is sent; a `ShardView` each   a DTensor each where a mesh was given
    LOCAL     nothing is sent; `_flat_param` of a unit, and originals as in SHARDED

Names are those of the module before it was wrapped. Values are copies of what units manage, but for
checkpoints (`SharedParts`): those get the parts themselves, as views with a mesh and of DTensors,
too; buffers and ignored parameters are as any module gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import AtRest, concatenated_mesh, dtensor_at_rest
from meshwright.comm.dtensors.gather_dtensor import ranges_held
from meshwright.comm.dtensors.gather_dtensor import whole as gathered
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.exposure import exposed_of, flat_layout, own_pieces
from meshwright.fsdp.exposures.tensor_axes import on_all_axes, part_of, whole_of, whole_shape
from meshwright.fsdp.groups import Groups
from meshwright.fsdp.options import FullStateDictConfig, StateDictSettings, StateDictType
from meshwright.fsdp.states.full_parameters import cut_line, gather_line
from meshwright.fsdp.traversal import clean_name
from meshwright.layout import Placement, Replicate, Shard, chunk
from meshwright.torch_internals.modules import FLAT, WRAPPED


def names_in_state(
    unit: Unit, names: Sequence[tuple[str, ...]], module: nn.Module
) -> list[tuple[str, ...]]:
    """List ``names`` of the parameters of ``unit``, and those by other ways to their modules."""
    ways: dict[nn.Module, list[str]] = {}
    for way, part in module.named_modules(remove_duplicate=False):
        ways.setdefault(part, []).append(clean_name(way))
    found: list[tuple[str, ...]] = []
    for slot, own in zip(unit.slots, names, strict=True):
        others = (f"{way}.{key}".lstrip(".") for m, key in slot.places for way in ways.get(m, ()))
        found.append(tuple(dict.fromkeys((*own, *others))))
    return found


def unit_entries(
    unit: Unit, names: Sequence[tuple[str, ...]], settings: StateDictSettings, groups: Groups
) -> dict[str, torch.Tensor]:
    """List the entries of one unit under the names seen from its wrapper; collective for FULL."""
    kind = settings.state_dict_type
    offloads = settings.state_dict_config.offload_to_cpu
    entries: dict[str, torch.Tensor] = {}
    rest = iter(names)
    for number, group in enumerate(unit.groups):
        if kind is StateDictType.LOCAL_STATE_DICT:
            key = FLAT if number == 0 else f"{FLAT}_{number}"
            entries[key] = _local_value(group, unit.name, offloads=offloads)
            if unit.exposure.one_flat is not None:
                continue
        # Views where originals are local, too: a plain tensor passes for the same on every rank.
        for value in _values(group, unit.name, settings, groups):
            entries.update(dict.fromkeys(next(rest), value.cpu() if offloads else value))
    return entries


def _values(
    group: ParameterGroup, name: str, settings: StateDictSettings, groups: Groups
) -> list[torch.Tensor]:
    layout, shard = flat_layout(group), group.buffer.shard
    if settings.shares:
        return _held_values(group)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT or group.axes.shard is None
    if is_full or groups.mesh is not None:
        label = f"state dict of {name}"
        parts = list(
            zip(cut_line(group, gather_line(group, shard, label)), group.slots, strict=True)
        )
        if is_full:
            wholes = [whole_of(part, slot.outer, label) for part, slot in parts]
            return [copy_of(whole) for whole in wholes]
        return [as_dtensor(part, groups, slot.outer, label) for part, slot in parts]
    pieces, offloads = own_pieces(group), settings.state_dict_config.offload_to_cpu
    parts = [_cut(shard, pieces.get(index)) for index in range(len(layout.names))]
    return [
        sharded_value(group, index, copy_of(part, offloads=offloads), layout.names[index])
        for index, part in enumerate(parts)
    ]


def _held_values(group: ParameterGroup) -> list[torch.Tensor]:
    """What this rank holds of each parameter, on the memory of the shard; nothing is sent."""
    shard, pieces = group.buffer.shard.detach(), own_pieces(group)
    wholes = cut_line(group, shard) if group.axes.shard is None else None
    return [
        sharded_value(group, index, _cut(shard, pieces.get(index)), slot.name)
        if wholes is None or slot.outer is not None
        else wholes[index]
        for index, slot in enumerate(group.slots)
    ]


def _cut(shard: torch.Tensor, piece: Any) -> torch.Tensor:  # noqa: ANN401 - a piece or None
    return shard[:0] if piece is None else shard[piece.offset : piece.offset + piece.numel]


def sharded_value(
    group: ParameterGroup, index: int, local: torch.Tensor, name: str
) -> torch.Tensor:
    """Make a tensor of the whole shape of parameter ``index``, of which ``local`` is here."""
    piece, outer = own_pieces(group).get(index), group.slots[index].outer
    return ShardView(
        local,
        0 if piece is None else piece.start,
        whole_shape(flat_layout(group).shapes[index], outer),
        name=name,
        communicator=group.axes.shard,
        within=() if outer is None else ranges_held(outer, name),
    )


def copy_of(tensor: torch.Tensor, *, offloads: bool = False, shares: bool = False) -> torch.Tensor:
    """Make a copy that the next step leaves alone, on the CPU if it ``offloads``.

    Where it ``shares``, returns the memory itself.
    """
    if shares:
        return tensor.detach()
    return tensor.detach().to("cpu" if offloads else tensor.device, copy=True)


def as_dtensor(
    whole: torch.Tensor, groups: Groups, outer: AtRest | None, label: str
) -> torch.Tensor:
    """A full tensor as a DTensor on the mesh, sharded along dim 0 over the last data axis.

    Of one that was a DTensor ``outer`` before it is this rank's part; any other is replicated on
    the mesh of these.
    """
    mesh, shard = groups.mesh, groups.shard
    if outer is not None:
        return on_all_axes(whole, outer, groups, label)
    if mesh is None:
        return whole
    start, length = chunk(whole.shape[0], shard.size, shard.rank)
    placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    placements[-1] = Shard(0)
    if groups.tensor is not None:
        placements += [Replicate() for _ in range(groups.tensor.ndim)]
        mesh = concatenated_mesh([mesh, groups.tensor])
    local = whole[start : start + length].clone()
    return dtensor_at_rest(local, mesh, placements, whole.shape, whole.stride())


def _local_total(group: ParameterGroup) -> int:
    """Count the elements of a unit's line in LOCAL state dicts: without all ranks' padding."""
    layout = flat_layout(group)
    alignment = math.gcd(16 // group.types.master.itemsize, *layout.offsets)
    return -(-layout.extent // alignment) * alignment


def _local_range(group: ParameterGroup) -> tuple[int, int]:
    """This rank's elements of that line."""
    total = _local_total(group)
    start, stop = flat_layout(group).shard_range(group.axes.part)
    return min(start, total), min(stop, total)


def _local_value(group: ParameterGroup, name: str, *, offloads: bool) -> torch.Tensor:
    total = _local_total(group)
    start, stop = _local_range(group)
    local = copy_of(group.buffer.shard[: stop - start], offloads=offloads)
    return ShardView(local, start, (total,), name=name, communicator=group.axes.shard)


# ------------------------------------------------------------------------------------ saving


class shown_names:  # noqa: N801 - it is used as a function: `with shown_names(unit):`
    """Lets the modules of a flat unit list the names of its parameters, with empty tensors."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = None if unit is None or unit.exposure.one_flat is None else unit
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        if self._unit is None:
            return
        exposure = self._unit.exposure
        if exposure.owner is not None:
            self._before.append((exposure.owner._parameters, FLAT, exposure.one_flat))
            exposure.owner._parameters.pop(FLAT, None)
        nothing = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        for slot in self._unit.slots:
            for module, name in slot.places:
                self._before.append((module._parameters, name, module._parameters.get(name)))
                module._parameters[name] = nothing

    def __exit__(self, *error: object) -> None:
        for parameters, name, before in self._before:
            parameters.pop(name, None)
            if before is not None:
                parameters[name] = before


def put_entries(
    destination: dict[str, Any],
    prefix: str,
    entries: dict[str, torch.Tensor],
    settings: StateDictSettings,
    *,
    rank: int,
) -> None:
    """Put ``entries`` in place, strip the wrapper's prefix, and apply the configuration."""
    inner = f"{prefix}{WRAPPED}."
    config = settings.state_dict_config
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    is_empty = isinstance(config, FullStateDictConfig) and config.rank0_only and rank != 0
    raw = [(key, destination.pop(key)) for key in list(destination) if key.startswith(inner)]
    if is_empty:
        return
    for key, found in raw:
        name = key[len(inner) :]
        value = entries.pop(name, found)
        if isinstance(value, torch.Tensor) and value is found:
            if is_local and value.numel() == 0 and not isinstance(value, ShardView):
                continue
            value = value.cpu() if config.offload_to_cpu else value
        destination[prefix + name] = value
    for name, value in entries.items():
        destination[prefix + name] = value


# ----------------------------------------------------------------------------------- loading


def rename_for_load(state: dict[str, Any], prefix: str) -> None:
    """Give the entries below ``prefix`` the names that the wrapped module has now."""
    inner = f"{prefix}{WRAPPED}."
    for key in [k for k in state if k.startswith(prefix) and not k.startswith(inner)]:
        state[inner + key[len(prefix) :]] = state.pop(key)


def clean_reported_names(module: nn.Module, incompatible: Any) -> None:  # noqa: ANN401 - torch's
    """Report missing and unexpected keys by the names that state dicts have."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) for key in keys]


@torch.no_grad()
def load_entries(
    unit: Unit,
    names: Sequence[tuple[str, ...]],
    state: dict[str, Any],
    prefix: str,
    problems: tuple[list[str], list[str]],
) -> None:
    """Take the unit's values out of ``state``; ``problems`` gets missing keys and errors."""
    inner = f"{prefix}{WRAPPED}."
    missing, errors = problems
    unit.reshard()
    is_flat = unit.exposure.one_flat is not None
    rest = iter(names)
    for number, group in enumerate(unit.groups):
        flat_key = inner + (FLAT if number == 0 else f"{FLAT}_{number}")
        flat = state.pop(flat_key, None)
        if flat is not None:
            _load_flat(group, flat, (clean_name(flat_key), errors))
        for index in range(len(group.slots)):
            own = next(rest)
            found = [state.pop(inner + name) for name in own if inner + name in state]
            if flat is not None:
                continue
            if found:
                _load_value(group, index, found[0], (clean_name(prefix + own[0]), errors))
            else:
                missing.append(prefix + own[0])
    exposure = exposed_of(unit)
    if is_flat:
        state[inner + FLAT] = exposure.parameters(unit)[0]
        return
    for slot, own in zip(unit.slots, names, strict=True):
        for name in own:
            state[inner + name] = slot.original


def _load_flat(group: ParameterGroup, flat: torch.Tensor, report: tuple[str, list[str]]) -> None:
    """Take a unit's line as LOCAL state dicts have it: only this rank's own range fits."""
    name, errors = report
    if group.axes.shard is None:
        raise RuntimeError(
            "``local_state_dict`` can only be used when parameters are flatten and sharded. Here "
            f"nothing is sharded: load {name} with FULL_STATE_DICT"
        )
    shard = group.buffer.shard
    start, stop = _local_range(group)
    local, first = (flat.local, flat.start) if isinstance(flat, ShardView) else (flat, start)
    local = local.reshape(-1)
    if local.numel() not in (stop - start, shard.numel()) or (local.numel() and first != start):
        errors.append(
            f"size mismatch for {name}: this rank holds elements {start} to {stop} of the unit, "
            f"and the state dict has {first} to {first + local.numel()}. A LOCAL state dict "
            "belongs to as many ranks as saved it; torch.distributed.checkpoint loads it on others"
        )
        return
    shard[: local.numel()].copy_(local)


def _load_value(
    group: ParameterGroup, index: int, value: torch.Tensor, report: tuple[str, list[str]]
) -> None:
    name, errors = report
    outer, piece = group.slots[index].outer, own_pieces(group).get(index)
    shape = whole_shape(flat_layout(group).shapes[index], outer)
    if tuple(value.shape) != shape:
        errors.append(
            f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from "
            f"checkpoint, the shape in current model is {shape}."
        )
        return
    target = _cut(group.buffer.shard, piece)
    if isinstance(value, ShardView):
        begin = 0 if piece is None else piece.start
        if value.local.numel() == target.numel() and (value.start == begin or not target.numel()):
            target.copy_(value.local)
            return
        value = value.full_tensor()
    else:
        value = gathered(value, label=f"whole {name}")
    if piece is not None:
        part = part_of(value.detach(), outer)
        target.copy_(part.reshape(-1)[piece.start : piece.stop])
