"""The state of an optimizer by names, in whole tensors wherever its parameters lie in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from meshwright.checkpoint import load_optimizer_state, optimizer_state
from meshwright.comm.whole import part_like, whole

__all__ = ["load_named_state", "named_state"]


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, object]:
    """``optimizer.state_dict()`` with names of ``module``'s parameters in place of numbers.

    All ranks call it together where parameters are sharded.
    """
    return tree_map(_whole, optimizer_state(optimizer, module.named_parameters()))


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
    load_optimizer_state(optimizer, held.items(), saved)


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
