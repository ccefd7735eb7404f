"""The keys of an optimizer's state: positions of parameters, or their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.fsdp.options import OptimStateKeyType
from meshwright.fsdp.traversal import clean_name


def by_current_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Rename what `state_to_load` returned, for an optimizer that knows parameters by name.

    Its names are those that ``model.named_parameters()`` gives now.
    """
    called = {parameter: name for name, parameter in model.named_parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    names = [called[parameter] for parameter in listed]
    return _with_keys(state, dict(enumerate(names)))


def _with_keys(state: Mapping[str, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    """``state`` with other keys for parameters."""
    found: dict[str, Any] = {"state": {change[key]: own for key, own in state["state"].items()}}
    if "param_groups" in state:
        found["param_groups"] = [
            {**group, "params": [change[key] for key in group["params"]]}
            for group in state["param_groups"]
        ]
    return found


def rekey(
    state: Mapping[str, Any],
    to: OptimStateKeyType,
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """``state`` of a module that is not wrapped, with names for positions or the other way."""
    if to not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, found {to!r}"
        )
    listed = (key for group in state.get("param_groups", ()) for key in group["params"])
    keys = [*state["state"], *listed]
    kinds = {type(key) for key in keys}
    if not kinds <= {int} and not kinds <= {str}:
        raise ValueError(f"Invalid parameter keys: {sorted(map(str, keys))}: expected one kind")
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    ordered = [name_of[parameter] for group in groups for parameter in group["params"]]
    change: dict[Any, Any]
    if to is OptimStateKeyType.PARAM_NAME:
        change = dict(enumerate(ordered)) if kinds == {int} else {name: name for name in ordered}
    else:
        numbers = {name: number for number, name in enumerate(ordered)}
        change = numbers if kinds == {str} else {number: number for number in range(len(ordered))}
    found = _with_keys(state, change)
    if to is OptimStateKeyType.PARAM_ID and "param_groups" in found:
        # An optimizer takes positions in its own order, whichever they are: what is listed n-th
        # becomes the state of its n-th parameter. A flat parameter stands where its unit does.
        for group in found["param_groups"]:
            group["params"].sort()
        found["param_groups"].sort(key=_first_position)
    return found


def _first_position(group: Mapping[str, Any]) -> float:
    return min(group["params"], default=math.inf)
