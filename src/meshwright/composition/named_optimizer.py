"""The state of an optimizer by the original names of its parameters, instead of by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from meshwright.comm.whole import part_like, whole

__all__ = ["load_named_state", "named_state"]


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names of ``module``'s parameters in place of numbers."""
    names = _names(optimizer, module)
    numbered = optimizer.state_dict()
    return {
        "state": {
            names[number]: tree_map(_whole, value) for number, value in numbered["state"].items()
        },
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in numbered["param_groups"]
        ],
    }


def load_named_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `named_state` returned, into an optimizer with the same groups of parameters.

    Raises ValueError naming the parameters that differ.
    """
    names = _names(optimizer, module)
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [name for name in state["state"] if name not in numbers]
    saved = [list(group["params"]) for group in state["param_groups"]]
    current: list[list[str]] = []
    start = 0
    for group in optimizer.param_groups:
        current.append(names[start : start + len(group["params"])])
        start += len(group["params"])
    if unknown or saved != current:
        raise ValueError(_mismatch(unknown, saved, current))
    held = dict(module.named_parameters())
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {key: _part(inner, held[name]) for key, inner in value.items()}
                for name, value in state["state"].items()
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in state["param_groups"]
            ],
        }
    )


def _whole(value: object) -> object:
    return whole(value, label="optimizer state") if isinstance(value, torch.Tensor) else value


def _part(value: object, parameter: torch.Tensor) -> object:
    """State of the parameter's shape is spread as it is; steps and the like stay whole."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape:
        return part_like(value, parameter)
    # torch keeps a step count as the tensor that it is given.
    return value.clone()


def _names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Names in the order of the optimizer's numbers."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: give it the parameters that parallelize hands out, no "
                    "others"
                )
            names.append(known[id(parameter)])
    return names


def _mismatch(unknown: list[str], saved: list[list[str]], current: list[list[str]]) -> str:
    sizes = f"{[len(g) for g in current]} parameters, found {[len(g) for g in saved]}"
    for number, (theirs, ours) in enumerate(zip(saved, current, strict=False)):
        if theirs != ours:
            missing = sorted(set(ours) - set(theirs)) or sorted(set(theirs) - set(ours)) or ours
            unknown = unknown or missing
            sizes = f"the same parameters in group {number}"
            break
    which = f"; look at {', '.join(unknown[:4])}" if unknown else ""
    return (
        f"the optimizer state belongs to another optimizer: expected groups with {sizes}{which}. "
        "Build the optimizer as in the run that saved it"
    )
