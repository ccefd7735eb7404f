"""The state of an optimizer by names, in whole tensors wherever its parameters lie in parts.

Flat parameters have none: their state is cut into that of the parameters, and put together again,
so that it is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint import load_optimizer_state, optimizer_state
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.gather_dtensor import part_like, whole
from meshwright.data_parallel.flat.optimizer import parts_of_flat
from meshwright.errors import CheckpointMismatchError
from meshwright.torch_internals.trees import tree_map

__all__ = ["load_named_state", "named_state"]


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, object]:
    """``optimizer.state_dict()`` with names of ``module``'s parameters in place of numbers.

    All ranks call it together where parameters are sharded.
    """
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    flats = _flats(optimizer, module, known)
    if not flats:
        return tree_map(_whole, optimizer_state(optimizer, module.named_parameters()))
    packed = optimizer_state(optimizer, flats.items())
    state: dict[str, dict[str, Any]] = {}
    for flat, values in cast("dict[str, dict[str, Any]]", packed["state"]).items():
        for key, value in values.items():
            for name, part in _cut(module, flats[flat], value, known):
                state.setdefault(name, {})[key] = part
    groups = [
        {
            **group,
            "params": [n for flat in group["params"] for n in _names(module, flats[flat], known)],
        }
        for group in cast("list[dict[str, Any]]", packed["param_groups"])
    ]
    return tree_map(_whole, {"state": state, "param_groups": groups})


def load_named_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `named_state` returned, into an optimizer with the same groups of parameters.

    Raises CheckpointMismatchError listing the parameters that differ.
    """
    held = dict(module.named_parameters())
    parts = {
        name: {key: _part(inner, held.get(name)) for key, inner in values.items()}
        for name, values in state["state"].items()
    }
    saved = {"state": parts, "param_groups": state["param_groups"]}
    known = {id(parameter): name for name, parameter in held.items()}
    flats = _flats(optimizer, module, known)
    if flats:
        saved = _joined(module, flats, known, saved)
    load_optimizer_state(optimizer, (flats or held).items(), saved)


def _flats(
    optimizer: Optimizer, module: nn.Module, known: Mapping[int, str]
) -> dict[str, nn.Parameter]:
    """List the optimizer's parameters, each by the names of what it holds, if any of them is
    flat.
    """
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(id(parameter) in known for parameter in given):
        return {}
    return {", ".join(_names(module, parameter, known)): parameter for parameter in given}


def _names(module: nn.Module, flat: nn.Parameter, known: Mapping[int, str]) -> list[str]:
    return [name for name, _ in _cut(module, flat, flat.detach(), known)]


def _cut(
    module: nn.Module, flat: nn.Parameter, value: object, known: Mapping[int, str]
) -> list[tuple[str, object]]:
    """Cut ``value`` for the parameters of ``flat``: a part each, or all that is one for them all.

    Parameters that are not ``known`` are copies of others in a step, and have nothing of their own.
    """
    found = parts_of_flat(module, flat, flat.detach())
    if found is None:
        return [(known[id(flat)], value)] if id(flat) in known else []
    if isinstance(value, torch.Tensor) and value.shape == flat.shape:
        found = parts_of_flat(module, flat, value) or found
    else:
        found = [(parameter, value) for parameter, _ in found]
    return [(known[id(parameter)], part) for parameter, part in found if id(parameter) in known]


def _joined(
    module: nn.Module,
    flats: Mapping[str, nn.Parameter],
    known: Mapping[int, str],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """List the state of flat parameters from that of the parameters in them.

    Raises CheckpointMismatchError where those differ in what is one for a flat parameter.
    """
    state: dict[str, dict[str, object]] = {}
    flat_of: dict[str, str] = {}
    for joined, flat in flats.items():
        names = _names(module, flat, known)
        flat_of.update(dict.fromkeys(names, joined))
        rows = {name: saved["state"].get(name, {}) for name in names}
        keys = list(dict.fromkeys(key for row in rows.values() for key in row))
        for key in keys:
            values = {name: row[key] for name, row in rows.items() if key in row}
            state.setdefault(joined, {})[key] = _one_of(module, flat, key, values, known)
    groups = []
    for group in saved["param_groups"]:
        listed = [flat_of.get(name, name) for name in group["params"]]
        groups.append({**group, "params": list(dict.fromkeys(listed))})
    return {"state": state, "param_groups": groups}


def _one_of(
    module: nn.Module,
    flat: nn.Parameter,
    key: str,
    values: Mapping[str, Any],
    known: Mapping[int, str],
) -> object:
    first = next(iter(values.values()))
    names = _names(module, flat, known)
    missing = [name for name in names if name not in values]
    if missing:
        raise CheckpointMismatchError(
            f"the saved optimizer has {key!r} of {next(iter(values))!r} but not of {missing[0]!r}, "
            "which are one flat parameter here: load it without flat = true in [train]"
        )
    line = torch.zeros(flat.shape, dtype=getattr(first, "dtype", None), device=flat.device)
    parts = _cut(module, flat, line, known)
    # A count has the shape of a parameter that has none.
    if key != "step" and all(
        isinstance(values[name], torch.Tensor) and values[name].shape == part.shape
        for name, part in cast("list[tuple[str, torch.Tensor]]", parts)
    ):
        for name, part in cast("list[tuple[str, torch.Tensor]]", parts):
            local_of(part).copy_(local_of(values[name]))
        return line
    other = [name for name in names if not _are_equal(values[name], first)]
    if other:
        raise CheckpointMismatchError(
            f"the saved optimizer has {key!r} = {first} for {names[0]!r} and {values[other[0]]} "
            f"for {other[0]!r}, which are one flat parameter here: load it without flat = true in "
            "[train]"
        )
    return first


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def _whole(value: object) -> object:
    return whole(value, label="optimizer state") if isinstance(value, torch.Tensor) else value


def _part(value: object, parameter: torch.Tensor | None) -> object:
    """State of the parameter's shape is spread as it is; steps and the like stay whole."""
    if not isinstance(value, torch.Tensor):
        return value
    if parameter is not None and value.shape == parameter.shape:
        return part_like(value, parameter)
    # torch keeps a step count as the tensor that it is given.
    return value.clone()
