"""The state of an optimizer by parameter name, as placed on this rank, also for flat parameters.

The state of flat parameters is split into that of the single parameters, and joined again, so that
a checkpoint is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.optimizers import load_optimizer_state, optimizer_state
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.data_parallel.flat_parameters import parts_of_flat
from meshwright.errors import CheckpointMismatchError


def named_state(
    optimizer: Optimizer, module: nn.Module, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with names of ``named`` for numbers; sends nothing.

    Tensors are the optimizer's own, or views of them.
    """
    flats = _Flats(optimizer, module, named)
    if not flats.held:
        return optimizer_state(optimizer, named.items())
    packed = optimizer_state(optimizer, flats.held.items())
    state: dict[str, dict[str, Any]] = {}
    for flat, values in cast("dict[str, dict[str, Any]]", packed["state"]).items():
        for key, value in values.items():
            for name, part in flats.cut(flats.held[flat], value):
                state.setdefault(name, {})[key] = part
    groups = [
        {**group, "params": [name for flat in group["params"] for name in flats.names[flat]]}
        for group in cast("list[dict[str, Any]]", packed["param_groups"])
    ]
    return {"state": state, "param_groups": groups}


def load_named_state(
    optimizer: Optimizer,
    module: nn.Module,
    named: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
    *,
    copies: bool = True,
) -> None:
    """Load what `named_state` returned, into an optimizer with the same groups of parameters.

    Without ``copies`` the tensors of ``state`` become the optimizer's own, and those for flat
    parameters are removed from it.

    Raises CheckpointMismatchError listing the parameters that differ.
    """
    flats = _Flats(optimizer, module, named)
    saved = flats.joined(state, takes=not copies) if flats.held else state
    load_optimizer_state(optimizer, (flats.held or named).items(), saved, copies=copies)


class _Flats:
    """The parameters of an optimizer, if any is flat, by the joined names of their parts."""

    def __init__(
        self, optimizer: Optimizer, module: nn.Module, named: Mapping[str, nn.Parameter]
    ) -> None:
        self._module = module
        self._known: dict[int, str] = {}
        for name, parameter in named.items():
            self._known.setdefault(id(parameter), name)
        self.held: dict[str, nn.Parameter] = {}
        self.names: dict[str, list[str]] = {}
        """Maps joined names to the single ones."""
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self._known for parameter in given):
            for parameter in given:
                names = [name for name, _ in self.cut(parameter, parameter.detach())]
                self.held[", ".join(names)] = parameter
                self.names[", ".join(names)] = names

    def cut(self, flat: nn.Parameter, value: object) -> list[tuple[str, object]]:
        """Split ``value`` among the parameters of ``flat``: a part each, or one value for all.

        Copies of tied parameters are left out.
        """
        known = self._known
        found = parts_of_flat(self._module, flat, flat.detach())
        if found is None:
            return [(known[id(flat)], value)] if id(flat) in known else []
        if isinstance(value, torch.Tensor) and value.shape == flat.shape:
            found = parts_of_flat(self._module, flat, value) or found
        else:
            found = [(parameter, value) for parameter, _ in found]
        return [(known[id(parameter)], part) for parameter, part in found if id(parameter) in known]

    def joined(self, saved: Mapping[str, Any], *, takes: bool) -> dict[str, Any]:
        """Join the state of single parameters to that of flat ones.

        With ``takes``, joined tensors are removed from ``saved``, so that no rank has all twice.

        Raises CheckpointMismatchError if they differ in a value that a flat parameter has once.
        """
        state: dict[str, dict[str, object]] = {}
        flat_of = {name: flat for flat, names in self.names.items() for name in names}
        for flat, names in self.names.items():
            rows = {name: saved["state"].get(name, {}) for name in names}
            for key in dict.fromkeys(key for row in rows.values() for key in row):
                having = {name: row for name, row in rows.items() if key in row}
                values = {n: row.pop(key) if takes else row[key] for n, row in having.items()}
                state.setdefault(flat, {})[key] = self._one_of(flat, key, values)
        groups = []
        for group in saved["param_groups"]:
            listed = [flat_of.get(name, name) for name in group["params"]]
            groups.append({**group, "params": list(dict.fromkeys(listed))})
        return {"state": state, "param_groups": groups}

    def _one_of(self, joined: str, key: str, values: Mapping[str, Any]) -> object:
        flat, names, first = self.held[joined], self.names[joined], next(iter(values.values()))
        missing = [name for name in names if name not in values]
        if missing:
            raise CheckpointMismatchError(
                f"the saved optimizer has {key!r} of {next(iter(values))!r} but not of "
                f"{missing[0]!r}, which are one flat parameter here: load it without flat = true "
                "in [train]"
            )
        line = torch.zeros(flat.shape, dtype=getattr(first, "dtype", None), device=flat.device)
        parts = cast("list[tuple[str, torch.Tensor]]", self.cut(flat, line))
        # A step count has the shape of a 0-dim parameter, so exclude it by name.
        if key != "step" and all(
            isinstance(values[name], torch.Tensor) and values[name].shape == part.shape
            for name, part in parts
        ):
            for name, part in parts:
                local_of(part).copy_(local_of(values[name]))
            return line
        other = [name for name in names if not _are_equal(values[name], first)]
        if other:
            raise CheckpointMismatchError(
                f"the saved optimizer has {key!r} = {first} for {names[0]!r} and "
                f"{values[other[0]]} for {other[0]!r}, which are one flat parameter here: load it "
                "without flat = true in [train]"
            )
        return first


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
