"""Models and their optimizers by the names of the plain model, whatever is around it.

::

    module.layers.0._orig_mod.weight        DistributedDataParallel around a compiled block
    layers.0._fsdp_wrapped_module.weight    FullyShardedDataParallel
    layers.0.weight                         the name in a checkpoint

Values have this rank's placement: plain tensors, DTensors, views of ranges. They share the memory
of the model if its state dict does, otherwise they are copies of this rank's parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.nested import flatten
from meshwright.checkpoint.optimizers import differing_groups
from meshwright.checkpoint.training.flat_optimizers import load_named_state, named_state
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.gather_dtensor import held
from meshwright.data_parallel.flat_parameters import parts_of_flat
from meshwright.data_parallel.modules.checkpoint_names import (
    SteppedOver,
    place_of,
    without_compiled,
)
from meshwright.errors import CheckpointMismatchError
from meshwright.fsdp.states.optimizer_exchange import names_by_parameter
from meshwright.fsdp.states.optimizer_state import optimizer_state as sharded_optimizer_state
from meshwright.fsdp.states.optimizer_state import state_to_load
from meshwright.fsdp.states.state_dict_types import giving_parts
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import wrappers_in

_T = TypeVar("_T")


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Make a function that removes from a name in ``model`` what its wrappers have added."""
    places: list[tuple[str, str]] = []
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, SteppedOver):
            inner = ".".join((path, *place_of(part, part._wrapped_as)))
            places.append((clean_name(path), clean_name(inner.lstrip("."))))

    def plain(name: str) -> str:
        name = clean_name(name)
        for outer, inner in reversed(places):  # inner wrappers first: names lead through the outer
            if inner != outer and f"{name}.".startswith(f"{inner}."):
                name = f"{outer}{name[len(inner) :]}".lstrip(".")
        return without_compiled(name)

    return plain


_COPY = " (copy)"
"""The suffix for a copy of a parameter that an earlier module (stage) has."""


def plain_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Map plain names to the parameters of ``modules``; a tied one once."""
    found: dict[str, nn.Parameter] = {}
    for module in modules:
        plain = plain_names(module)
        for name, parameter in module.named_parameters():
            _add(found, plain(name), parameter)
    return found


def _add(found: dict[str, _T], name: str, value: _T) -> str:
    """Add ``value`` under ``name``, with `_COPY` if that is taken; returns the name used."""
    while found.setdefault(name, value) is not value:
        name += _COPY
    return name


def _original(name: str) -> str:
    while name.endswith(_COPY):
        name = name.removesuffix(_COPY)
    return name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """The place of a value in the state dict of a module."""

    state: dict[str, Any]
    name: str


class ModelState:
    """The state of ``modules`` by plain names, with this rank's placement."""

    def __init__(self, modules: Sequence[nn.Module], ties: Mapping[str, str] | None = None) -> None:
        """``ties`` maps other names to first ones for ties across ranks."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors by first name."""
        self.ties: dict[str, str] = {}
        """By other names of tied tensors, the first."""
        self.rest: dict[str, object] = {}
        """All values that are not tensors: the extra state of modules."""
        self.parameters: set[str] = set()
        """The first names of parameters."""
        self._copies: list[tuple[str, Tensor]] = []
        self._found: list[tuple[nn.Module, dict[str, Any]]] = []
        self._places: dict[str, list[_Entry]] = {}
        known = dict(ties or {})
        first: dict[int, str] = {}
        for module in modules:
            plain = plain_names(module)
            with giving_parts(module):
                found = module.state_dict(keep_vars=True)
            self._found.append((module, found))
            for own, value in found.items():
                name = plain(own)
                if not isinstance(value, Tensor):
                    self.rest.setdefault(name, value)
                    self._places.setdefault(name, []).append(_Entry(state=found, name=own))
                    continue
                one = first.setdefault(id(value), known.get(name, name))
                if self.tensors.setdefault(one, value) is not value and name not in known:
                    self._copies.append((one, value))
                if isinstance(value, nn.Parameter):
                    self.parameters.add(one)
                if name != one:
                    self.ties[name] = one

    def names(self) -> dict[str, Tensor]:
        """Map every name to its tensor."""
        return {**self.tensors, **{name: self.tensors[one] for name, one in self.ties.items()}}

    def set_rest(self, name: str, value: object) -> None:
        """Set the extra state ``name`` for `load`."""
        for place in self._places[name]:
            place.state[place.name] = value
        self.rest[name] = value

    def check_copies(self) -> None:
        """Raise ValueError if modules have different values under one name."""
        other = [
            name for name, copy in self._copies if not _is_copy(name, self.tensors[name], copy)
        ]
        for name, places in self._places.items():
            states = [place.state[place.name] for place in places]
            other += [name for state in states[1:] if not _are_alike(states[0], state)]
        if other:
            raise ValueError(
                f"several of the modules have a {other[0]!r} with values of its own, and a "
                "checkpoint has one of each name: give a module that holds them under names of "
                'their own, as model=torch.nn.ModuleDict({"first": first, "second": second})'
            )

    @torch.no_grad()
    def load(self) -> None:
        """Load the current values, filled in place, into the modules."""
        for name, copy in self._copies:
            local_of(copy.detach()).copy_(local_of(self.tensors[name].detach()))
        for module, found in self._found:
            with giving_parts(module):
                module.load_state_dict(found)


def _is_copy(name: str, tensor: Tensor, other: Tensor) -> bool:
    """Whether this rank's parts of both are bitwise equal."""
    one, two = held(tensor, name), held(other, name)
    if (one.shape, one.boxes, one.local.dtype) != (two.shape, two.boxes, two.local.dtype):
        return False
    bits = [each.local.contiguous().reshape(-1).view(torch.uint8) for each in (one, two)]
    return torch.equal(*bits)


def _are_alike(one: object, other: object) -> bool:
    """Whether two states are equal, tensors bitwise."""
    (tensors, structure), (others, structured) = flatten(one, ""), flatten(other, "")
    pairs = ((name, tensor, others.get(name)) for name, tensor in tensors.items())
    return structure == structured and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and _is_copy(name, a, b)
        for name, a, b in pairs
    )


# --------------------------------------------------------------------------------- optimizers


class NamedOptimizer:
    """An optimizer of parameters of ``modules``, by their plain names.

    Raises ValueError for a parameter that is not among theirs.
    """

    groups: list[list[str]]
    """The names of each group, one for all copies of a parameter."""

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        self._optimizer = optimizer
        self._model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._named = plain_parameters(modules)
        self._is_managed = bool(wrappers_in(self._model))
        known = {id(parameter) for parameter in self._named.values()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                line = parameter.detach()
                if id(parameter) not in known and (
                    parts_of_flat(self._model, parameter, line) is None
                ):
                    raise ValueError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that "
                        "is not in the model: build it from the parameters of the wrapped model, "
                        "and give save and load that model"
                    )
        self._plain: dict[str, str] = {}
        if self._is_managed:
            plain = plain_names(self._model)
            names = names_by_parameter(self._model)
            listed = [[n for p in g["params"] for n in names[p]] for g in optimizer.param_groups]
            known_as: dict[str, str] = {}
            for name in (name for group in listed for name in group):
                # In a ModuleList names begin with the number of the module.
                own = plain(name) if len(modules) == 1 else plain(name).partition(".")[2]
                self._plain[name] = _add(known_as, own, name)
            self._given = [[self._plain[name] for name in group] for group in listed]
        else:
            self._given = [group["params"] for group in self._state()["param_groups"]]
        self.groups = _without_copies(self._given)

    def state(self) -> dict[str, Any]:
        """Return state and groups by name; all ranks must call this.

        Raises ValueError if copies of a parameter have different states.
        """
        found = self._state()
        for copy in [name for name in found["state"] if name != _original(name)]:
            values, name = found["state"].pop(copy), _original(copy)
            if not _are_alike(values, found["state"].setdefault(name, values)):
                raise ValueError(
                    f"the optimizer has other state for one {name!r} than for its copy, and a "
                    "checkpoint has one of each name: give a module that holds them under names "
                    "of their own"
                )
        for group, names in zip(found["param_groups"], self.groups, strict=True):
            group["params"] = names
        return found

    def _state(self) -> dict[str, Any]:
        if not self._is_managed:
            return named_state(self._optimizer, self._model, self._named)
        with giving_parts(self._model) as settings:
            found = sharded_optimizer_state(self._model, self._optimizer, settings)
        for group in found["param_groups"]:
            group.pop("param_names", None)
        return _renamed(found, self._plain)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`, sharded like the parameters; all ranks must call this.

        The tensors of ``state`` become the optimizer's own.

        Raises CheckpointMismatchError if names or groups differ.
        """
        state = self._with_copies(state)
        if not self._is_managed:
            load_named_state(self._optimizer, self._model, self._named, state, copies=False)
            return
        problems = differing_groups(self._given, [g["params"] for g in state["param_groups"]])
        if problems:
            raise CheckpointMismatchError(
                "\n  ".join(["the saved optimizer does not fit this one:", *problems])
            )
        own = _renamed(state, {plain: name for name, plain in self._plain.items()})
        optimizer = self._optimizer
        with giving_parts(self._model) as settings:
            groups, before = optimizer.param_groups, optimizer.state
            loaded = state_to_load(self._model, groups, own, settings, held=before)
        optimizer.load_state_dict(loaded)

    def _with_copies(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a copy of the state for each copy of a parameter."""
        given: defaultdict[str, list[str]] = defaultdict(list)
        for name in (name for group in self._given for name in group):
            given[_original(name)].append(name)
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


def _without_copies(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(dict.fromkeys(map(_original, group))) for group in groups]


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    found = {names.get(name, name): values for name, values in state["state"].items()}
    return {"state": found, "param_groups": groups}
