"""The state of an optimizer by parameter name, with this rank's placement, under any wrapper.

State of a flat parameter is split when saved and joined when loaded, so that a checkpoint is the
same with and without flat parameters::

    flat parameter    {"exp_avg": (17,), "step": ()}
    named             {"first.weight": {"exp_avg": (7, 2), "step": ()}, "first.bias": ...}

torch numbers parameters in the order in which an optimizer got them. In another program, or after
layers have moved, a parameter would get the moments of another. So each state is keyed by the
parameter's name, and a mismatch is rejected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.training.wrapped import (
    COPY,
    add,
    are_alike,
    plain_names,
)
from meshwright.comm.dtensors.dtensor import is_dtensor, local_of
from meshwright.data_parallel.flat_parameters import parts_of_flat
from meshwright.errors import CheckpointMismatchError
from meshwright.fsdp.states.named import Form, Part, values_of
from meshwright.fsdp.states.optimizer_state import managed_parameters


def optimizer_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, object]:
    """Return ``{"state": {name: {...}}, "param_groups": [{"params": [names], "lr": ...}]}``.

    ``flatten`` turns it into named tensors and JSON. Tensors are the optimizer's own, not copies.
    Raises ``ValueError`` for a parameter of the optimizer without a name.
    """
    names = _names(optimizer, named_parameters)
    packed = optimizer.state_dict()
    state = {names[index]: dict(packed["state"][index]) for index in sorted(packed["state"])}
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    for group in groups:
        group.pop("param_names", None)  # torch's names, of the wrapped model; each optimizer's own
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    saved: object,
    *,
    copies: bool = True,
) -> None:
    """Load the state that ``optimizer_state`` returned, by name and without any cast.

    Without ``copies`` the tensors of ``saved`` become the optimizer's own.

    Raises ``CheckpointMismatchError`` listing every parameter that is missing, unknown or in
    another group, before anything is changed.
    """
    names = _names(optimizer, named_parameters)
    state, groups = _checked(saved)
    packed = optimizer.state_dict()
    mine = [[names[index] for index in group["params"]] for group in packed["param_groups"]]
    listed = [[str(name) for name in cast("list[object]", g["params"])] for g in groups]
    problems = differing_groups(mine, listed)
    known = {name for names in listed for name in names}
    problems += [f"{name!r} has state but no group" for name in sorted(state.keys() - known)]
    if problems:
        raise CheckpointMismatchError(
            "\n  ".join(["the saved optimizer does not fit this one:", *problems])
        )
    index_of = {name: index for index, name in enumerate(names)}
    own_groups = [
        {**saved_group, "params": group["params"]}
        for group, saved_group in zip(packed["param_groups"], groups, strict=True)
    ]
    own_state = {index_of[name]: dict(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})
    _restore_as_saved(optimizer, names, state, copies=copies)


def _names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """List the name of each parameter, in the order in which ``state_dict`` numbers them."""
    by_identity: dict[int, str] = {}
    for name, parameter in named_parameters:
        by_identity.setdefault(id(parameter), name)
    found: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in by_identity:
                raise ValueError(
                    f"the optimizer's parameter {len(found)} of shape {tuple(parameter.shape)} is"
                    " not among the named parameters"
                )
            found.append(by_identity[id(parameter)])
    return found


def _checked(saved: object) -> tuple[dict[str, dict[str, object]], list[dict[str, object]]]:
    """Return ``state`` and ``param_groups`` of a saved optimizer state.

    Raises CheckpointMismatchError if ``saved`` has another structure.
    """
    if isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}:
        state, groups = saved["state"], saved["param_groups"]
        if (
            isinstance(state, dict)
            and isinstance(groups, list)
            and all(isinstance(values, dict) for values in state.values())
            and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        ):
            return state, groups
    raise CheckpointMismatchError(
        "expected the state of an optimizer as optimizer_state makes it"
        f" (a dict with 'state' and 'param_groups'), found {str(saved)[:80]}"
    )


def differing_groups(here: Sequence[Sequence[str]], there: Sequence[Sequence[str]]) -> list[str]:
    """Describe each parameter that is missing or in another group than in the checkpoint."""
    mine = {name: number for number, names in enumerate(here) for name in names}
    saved = {name: number for number, names in enumerate(there) for name in names}
    problems = [f"{name!r} has no saved state" for name in sorted(mine.keys() - saved.keys())]
    problems += [
        f"{name!r} is saved but not a parameter here" for name in sorted(saved.keys() - mine.keys())
    ]
    problems += [
        f"{name!r} is in group {saved[name]} in the checkpoint, in group {mine[name]} here"
        for name in sorted(mine.keys() & saved.keys())
        if mine[name] != saved[name]
    ]
    if len(here) != len(there):
        problems.append(f"{len(there)} groups in the checkpoint, {len(here)} here")
    return problems


def _restore_as_saved(
    optimizer: Optimizer, names: list[str], state: dict[str, dict[str, object]], *, copies: bool
) -> None:
    """Undo the cast to the parameter's dtype that torch's ``load_state_dict`` makes silently.

    Values of a parameter's shape also get its strides: fused steps iterate over the memory of both
    as flat arrays, and would pair wrong elements if the strides differed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    taken: set[int] = set()  # parameters may share one saved state, but need one each
    for name, parameter in zip(names, parameters, strict=True):
        own = optimizer.state[parameter] if name in state else {}
        for key, value in state.get(name, {}).items():
            loaded = own.get(key)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            is_alike = loaded.shape == parameter.shape and not is_dtensor(parameter)
            if is_alike and loaded.stride() != parameter.stride():
                like = parameter.detach().as_subclass(Tensor)
                laid = torch.empty_like(like, dtype=value.dtype, device=loaded.device)
                own[key] = laid.copy_(value)
            elif loaded.dtype != value.dtype:
                own[key] = value.to(loaded.device, copy=True)
            # torch has kept the tensor of ``saved``, which needed no cast.
            elif loaded.data_ptr() == value.data_ptr():
                place = local_of(loaded).data_ptr()
                if copies or place in taken or _is_of_more(loaded):
                    own[key] = torch.clone(loaded)
                taken.add(place)


def _is_of_more(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of larger memory, which it would keep alive."""
    return type(tensor) is Tensor and tensor.untyped_storage().nbytes() > tensor.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Member:
    """A parameter of the optimizer, and the parameters of the model that it holds."""

    parameter: nn.Parameter
    names: list[str]
    cut: Callable[[Tensor], list[Tensor]] | None = None
    """Splits a tensor of its shape into views, one for each name; None if it is the model's own."""
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

        Raises CheckpointMismatchError for different values where a flat parameter has only one.
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
        """Return the name under which a copy is saved."""
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
        joined are removed from ``state``, so that no rank has all twice.

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
