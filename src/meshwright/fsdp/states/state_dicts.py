"""Model state dicts of three kinds: whole tensors, parts with the global shape, flat shards.

::

    FULL      plain whole tensors            one all-gather for each group of a unit
    SHARDED   a `ShardView` each             nothing is sent
              a DTensor each, given a mesh   one all-gather for each group of a unit
    LOCAL     `_flat_param` of a unit        nothing is sent

With ``use_orig_params``, LOCAL also has the entries of SHARDED. Loading plain tensors and flat
shards sends nothing; loading views or DTensors is a collective.

Names are those of the module before wrapping. Values of parameters in units are copies, except for
checkpoints (`SharedParts`), which get views of the parts themselves, also with a mesh and for
DTensors. Buffers and ignored parameters are as in any module's state dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.data_parallel.shards.parameter_group import ParameterGroup
from meshwright.data_parallel.shards.unit import Unit
from meshwright.fsdp.exposures.exposure import flat_layout
from meshwright.fsdp.groups import Groups
from meshwright.fsdp.options import FullStateDictConfig, StateDictSettings, StateDictType
from meshwright.fsdp.states.named import Form, Part, by_group, parts_of, values_of
from meshwright.fsdp.traversal import UnitDriver, clean_name
from meshwright.torch_internals.modules import FLAT, WRAPPED


def parts_in_state(unit: Unit, driver: UnitDriver, module: nn.Module, groups: Groups) -> list[Part]:
    """List the parameters of ``unit`` under all their names as seen from ``module``."""
    ways: dict[nn.Module, list[str]] = {}
    for way, part in module.named_modules(remove_duplicate=False):
        ways.setdefault(part, []).append(clean_name(way))
    names: list[tuple[str, ...]] = []
    for slot, own in zip(unit.slots, driver.own_names, strict=True):
        others = (f"{way}.{key}".lstrip(".") for m, key in slot.places for way in ways.get(m, ()))
        names.append(tuple(dict.fromkeys((*own, *others))))
    return parts_of(unit, names, groups)


def unit_entries(
    unit: Unit, parts: Sequence[Part], settings: StateDictSettings
) -> dict[str, torch.Tensor]:
    """List the entries of one unit under the names seen from its wrapper; collective for FULL."""
    kind = settings.state_dict_type
    offloads = settings.state_dict_config.offload_to_cpu
    # Views where originals are local, too: a plain tensor passes for the same on every rank.
    is_full = kind is StateDictType.FULL_STATE_DICT
    form = Form(is_full=is_full, offloads=offloads, shares=settings.shares)
    entries: dict[str, torch.Tensor] = {}
    for number, (group, own) in enumerate(by_group(unit, parts)):
        if kind is StateDictType.LOCAL_STATE_DICT:
            key = FLAT if number == 0 else f"{FLAT}_{number}"
            entries[key] = _local_value(group, unit.name, form)
            if unit.exposure.one_flat is not None:
                continue
        shard = group.buffer.shard
        elements = [part.cut(shard) for part in own]
        values = values_of(own, elements, form, f"state dict of {unit.name}", shard)
        for part, value in zip(own, values, strict=True):
            entries.update(dict.fromkeys(part.names, value))
    return entries


def _local_total(group: ParameterGroup) -> int:
    """Count the elements of a unit's buffer in LOCAL state dicts: without all ranks' padding."""
    layout = flat_layout(group)
    alignment = math.gcd(16 // group.types.master.itemsize, *layout.offsets)
    return -(-layout.extent // alignment) * alignment


def _local_range(group: ParameterGroup) -> tuple[int, int]:
    total = _local_total(group)
    start, stop = flat_layout(group).shard_range(group.axes.part)
    return min(start, total), min(stop, total)


def _local_value(group: ParameterGroup, name: str, form: Form) -> torch.Tensor:
    total = _local_total(group)
    start, stop = _local_range(group)
    local = form.of(group.buffer.shard[: stop - start])
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
    """Rename the entries below ``prefix`` to the current names in the wrapped module."""
    inner = f"{prefix}{WRAPPED}."
    for key in [k for k in state if k.startswith(prefix) and not k.startswith(inner)]:
        state[inner + key[len(prefix) :]] = state.pop(key)


def clean_reported_names(module: nn.Module, incompatible: Any) -> None:  # noqa: ANN401 - torch's
    """Report missing and unexpected keys by the names that state dicts use."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) for key in keys]


@torch.no_grad()
def load_entries(
    unit: Unit,
    parts: Sequence[Part],
    state: dict[str, Any],
    prefix: str,
    problems: tuple[list[str], list[str]],
) -> None:
    """Take the unit's values out of ``state``; ``problems`` gets missing keys and errors."""
    inner = f"{prefix}{WRAPPED}."
    missing, errors = problems
    unit.reshard()
    for number, (group, own) in enumerate(by_group(unit, parts)):
        flat_key = inner + (FLAT if number == 0 else f"{FLAT}_{number}")
        flat = state.pop(flat_key, None)
        if flat is not None:
            _load_flat(group, flat, (clean_name(flat_key), errors))
        values: dict[Part, torch.Tensor] = {}
        for part in own:
            found = [state.pop(inner + name) for name in part.names if inner + name in state]
            if found and flat is None:
                values[part] = found[0]
            elif flat is None:
                missing.append(prefix + part.names[0])
        for part, value in _gathered_misfits(values).items():
            _load_value(part, value, clean_name(prefix + part.names[0]), errors)
    # What is registered is in place already: torch copies each onto itself.
    if unit.exposure.one_flat is not None:
        state[inner + FLAT] = parts[0].exposed
        return
    for slot, part in zip(unit.slots, parts, strict=True):
        for name in part.names:
            state[inner + name] = slot.original


def _load_flat(group: ParameterGroup, flat: torch.Tensor, report: tuple[str, list[str]]) -> None:
    """Load a unit's buffer from a LOCAL state dict: only this rank's own range fits."""
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


def _gathered_misfits(values: Mapping[Part, torch.Tensor]) -> dict[Part, torch.Tensor]:
    """Gather each view that another wrapping has split differently from its part here.

    Collective. All ranks gather a view that does not fit on one rank: a rank with elements of
    neither sees no misfit, and would otherwise skip the gather while the others wait for it.
    """
    found = dict(values)
    by_axis: dict[Communicator, list[tuple[Part, ShardView]]] = {}
    for part, value in values.items():
        if isinstance(value, ShardView) and tuple(value.shape) == part.shape:
            axis = value.communicator or part.group.axes.shard
            if axis is not None:
                by_axis.setdefault(axis, []).append((part, value))
    for axis, views in by_axis.items():
        own = [part.fits(view) for part, view in views]
        everyones = axis.gather_values(own, label="parts that fit")
        for (part, view), *fits in zip(views, *everyones, strict=True):
            found[part] = view if all(fits) else view.full_tensor()
    return found


def _load_value(part: Part, value: torch.Tensor, name: str, errors: list[str]) -> None:
    if tuple(value.shape) != part.shape:
        errors.append(
            f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from "
            f"checkpoint, the shape in current model is {part.shape}."
        )
        return
    part.cut(part.group.buffer.shard).copy_(part.elements_of(value, f"whole {name}"))
