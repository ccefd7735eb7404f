"""The state of an optimizer by parameter name, with this rank's placement, under any wrapper.

What lies in one flat parameter is split on the way out, and joined on the way in, so that a
checkpoint is the same with and without flat parameters::

    flat parameter    {"exp_avg": (17,), "step": ()}
    named             {"first.weight": {"exp_avg": (7, 2), "step": ()}, "first.bias": ...}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.optimizers import load_optimizer_state, optimizer_state
from meshwright.checkpoint.training.wrapped import (
    COPY,
    add,
    are_alike,
    plain_names,
)
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.data_parallel.flat_parameters import parts_of_flat
from meshwright.errors import CheckpointMismatchError
from meshwright.fsdp.states.named import Form, Part, values_of
from meshwright.fsdp.states.optimizer_exchange import managed_parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Member:
    """A parameter of the optimizer, and the parameters of the model that lie in it."""

    parameter: nn.Parameter
    names: list[str]
    cut: Callable[[Tensor], list[Tensor]] | None = None
    """Splits a tensor of its shape: views, one for each name; None where it is the model's."""
    remedy: str = "without flat = true in [train]"
    is_managed: bool = False
    """True under FullyShardedDataParallel: parameters without state count as zeros."""
    is_empty: bool = False
    """True where other ranks have all elements: this one gets no gradients, and counts nothing."""

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    def split(self, value: object) -> list[Any]:
        """Split ``value``: a part for each name, or one value for all."""
        is_tensor = isinstance(value, Tensor) and value.ndim > 0
        if self.cut is None or not is_tensor or value.shape != self.parameter.shape:
            return [value] * len(self.names)
        return self.cut(value)

    def join(self, key: str, values: Mapping[str, Any], has_state: Sequence[str]) -> object:
        """Join the ``values`` of single parameters; names that have none are without state.

        Raises CheckpointMismatchError if they differ in a value that the flat parameter has once.
        """
        first = next(iter(values.values()))
        if self.cut is None:
            return first
        missing = [name for name in has_state if name not in values]
        if missing:
            raise CheckpointMismatchError(
                f"the saved optimizer has {key!r} of {next(iter(values))!r} but not of "
                f"{missing[0]!r}, which are one flat parameter here: load it {self.remedy}"
            )
        parameter = self.parameter
        line = torch.zeros(
            parameter.shape, dtype=getattr(first, "dtype", None), device=parameter.device
        )
        parts = dict(zip(self.names, self.cut(line), strict=True))
        # A step count has the shape of a 0-dim parameter, so exclude it by name.
        if key != "step" and all(
            isinstance(value, Tensor) and value.shape == parts[name].shape
            for name, value in values.items()
        ):
            for name, value in values.items():
                local_of(parts[name]).copy_(local_of(value))
            return line
        for name, value in values.items():
            if self.is_managed and isinstance(value, Tensor) and value.ndim > 0:
                raise ValueError(
                    "Tensor optimizer state does not have same shape as its parameter: expected "
                    f"{tuple(parts[name].shape)} for {name}, found {tuple(value.shape)}"
                )
        other = [name for name, value in values.items() if not _are_equal(value, first)]
        if other:
            raise CheckpointMismatchError(
                f"the saved optimizer has {key!r} = {first} for {next(iter(values))!r} and "
                f"{values[other[0]]} for {other[0]!r}, which are one flat parameter here: load it "
                f"{self.remedy}"
            )
        return first


class NamedOptimizer:
    """An optimizer of parameters of ``modules``, by their plain names. Nothing is sent.

    Raises ValueError for a parameter that is not among theirs.
    """

    groups: list[list[str]]
    """The names of each group, one for all copies of a parameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        ties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``ties`` maps other names to first ones for ties across ranks."""
        self._optimizer = optimizer
        self._ties = ties
        find = _members(modules)
        listed = [[find(each) for each in group["params"]] for group in optimizer.param_groups]
        self._members = [member for group in listed for member in group]
        self._given = [[name for member in group for name in member.names] for group in listed]
        self.groups = [list(dict.fromkeys(map(self._first, group))) for group in self._given]

    def _first(self, name: str) -> str:
        """The name that a copy is saved by."""
        while name.endswith(COPY):
            name = name.removesuffix(COPY)
        return self._ties.get(name, name)

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(member.name, member.parameter) for member in self._members]

    def state(self) -> dict[str, Any]:
        """Return state and groups by name; tensors are the optimizer's own, or views of them.

        Raises ValueError if copies of a parameter have different states.
        """
        packed = optimizer_state(self._optimizer, self._named)
        held = cast("dict[str, dict[str, Any]]", packed["state"])
        state: dict[str, dict[str, Any]] = {}
        for member in self._members:
            if member.name not in held or member.is_empty:
                continue
            own: list[dict[str, Any]] = [{} for _ in member.names]
            for key, value in held[member.name].items():
                for each, part in zip(own, member.split(value), strict=True):
                    each[key] = part
            state.update(zip(member.names, own, strict=True))
        for copy in [name for name in state if name != self._first(name)]:
            values, name = state.pop(copy), self._first(copy)
            if not are_alike(values, state.setdefault(name, values)):
                raise ValueError(
                    f"the optimizer has other state for one {name!r} than for its copy, and a "
                    "checkpoint has one of each name: give a module that holds them under names "
                    "of their own"
                )
        packed_groups = cast("list[dict[str, Any]]", packed["param_groups"])
        pairs = zip(packed_groups, self.groups, strict=True)
        return {"state": state, "param_groups": [{**g, "params": names} for g, names in pairs]}

    def load(self, state: Mapping[str, Any], *, copies: bool = False) -> None:
        """Load the result of `state`, sharded like the parameters.

        Without ``copies`` the tensors of ``state`` become the optimizer's own, and those that are
        joined are removed from it, so that no rank has all twice.

        Raises CheckpointMismatchError listing the parameters that differ.
        """
        state = self._with_copies(state)
        saved: Mapping[str, dict[str, Any]] = state["state"]
        joined: dict[str, dict[str, Any]] = dict(saved)
        known_as: dict[str, str] = {}
        for member in self._members:
            known_as.update(dict.fromkeys(member.names, member.name))
            if member.cut is None:
                continue
            rows = {name: joined.pop(name, {}) for name in member.names}
            if member.is_empty and member.parameter not in self._optimizer.state:
                continue
            has_state = [name for name, row in rows.items() if row or not member.is_managed]
            for key in dict.fromkeys(key for row in rows.values() for key in row):
                having = {name: row for name, row in rows.items() if key in row}
                values = {n: row[key] if copies else row.pop(key) for n, row in having.items()}
                joined.setdefault(member.name, {})[key] = member.join(key, values, has_state)
        groups = [
            {**g, "params": list(dict.fromkeys(known_as.get(n, n) for n in g["params"]))}
            for g in state["param_groups"]
        ]
        loaded = {"state": joined, "param_groups": groups}
        load_optimizer_state(self._optimizer, self._named, loaded, copies=copies)

    def _with_copies(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a copy of the state for each copy of a parameter."""
        given: defaultdict[str, list[str]] = defaultdict(list)
        for name in (name for group in self._given for name in group):
            given[self._first(name)].append(name)
        if all(names == [original] for original, names in given.items()):
            return state
        groups = [
            {**group, "params": [n for name in group["params"] for n in given.get(name, [name])]}
            for group in state["param_groups"]
        ]
        values: dict[str, dict[str, Any]] = {}
        for original, own in state["state"].items():
            first, *others = given.get(original, [original])
            values[first] = own
            for name in others:
                values[name] = {
                    k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()
                }
        return {"state": values, "param_groups": groups}


def _members(modules: Sequence[nn.Module]) -> Callable[[nn.Parameter], _Member]:
    """Make a function that finds the names of an optimizer's parameter."""
    known: dict[int, str] = {}
    managed: defaultdict[nn.Parameter, dict[str, Part]] = defaultdict(dict)
    called: dict[str, object] = {}
    for module in modules:
        plain = plain_names(module)
        for part in managed_parameters(module):
            managed[part.exposed][add(called, plain(part.names[0]), part)] = part
        for name, parameter in module.named_parameters():
            if parameter not in managed:  # one table of names: copies may have other wrappers
                known[id(parameter)] = add(called, plain(name), parameter)
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    def find(parameter: nn.Parameter) -> _Member:
        if parameter in managed:
            return _managed(parameter, managed[parameter])
        if id(parameter) in known:
            return _Member(parameter=parameter, names=[known[id(parameter)]])
        found = parts_of_flat(model, parameter, parameter.detach())
        if found is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in "
                "the model: build it from the parameters of the wrapped model, and give save and "
                "load that model"
            )

        def cut(line: Tensor) -> list[Tensor]:  # without copies of tied parameters
            parts = parts_of_flat(model, parameter, line) or ()
            return [part for each, part in parts if id(each) in known]

        names = [known[id(each)] for each, _ in found if id(each) in known]
        return _Member(parameter=parameter, names=names, cut=cut)

    return find


def _managed(parameter: nn.Parameter, parts: Mapping[str, Part]) -> _Member:
    own, form = list(parts.values()), Form(is_full=False, shares=True)

    def cut(line: Tensor) -> list[Tensor]:
        return values_of(own, [part.cut_exposed(line) for part in own], form, "optimizer state")

    return _Member(
        parameter=parameter,
        names=list(parts),
        cut=cut,
        remedy="with use_orig_params=True",
        is_managed=True,
        is_empty=not own[0].counts,
    )


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
