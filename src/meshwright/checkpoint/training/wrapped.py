"""Models and their optimizers by the names of the plain model, whatever is around it.

::

    module.layers.0._orig_mod.weight        DistributedDataParallel around a compiled block
    layers.0._fsdp_wrapped_module.weight    FullyShardedDataParallel
    layers.0.weight                         the name in a checkpoint

Values lie as they lie on this rank: plain tensors, DTensors, views of ranges. They are the memory
of the model where its state dict gives that, else copies of what this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.optimizers import differing_groups
from meshwright.checkpoint.training.flat_optimizers import load_named_state, named_state
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


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Make the function that leaves out of a name in ``model`` what its wrappers have added."""
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


def plain_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """List the parameters of ``modules`` by plain name; a tied one once."""
    found: dict[str, nn.Parameter] = {}
    for module in modules:
        plain = plain_names(module)
        for name, parameter in module.named_parameters():
            found.setdefault(plain(name), parameter)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """The place of a value in the state dict of a module."""

    state: dict[str, Any]
    name: str


class ModelState:
    """The state of ``modules`` by plain names, as it lies on this rank."""

    def __init__(self, modules: Sequence[nn.Module], ties: Mapping[str, str] | None = None) -> None:
        """Take it. ``ties`` are those that stages of other ranks have a part in."""
        self.tensors: dict[str, Tensor] = {}
        """By the first name of each."""
        self.ties: dict[str, str] = {}
        """By other names of tied tensors, the first."""
        self.rest: dict[str, object] = {}
        """All that is no tensor: the extra state of modules."""
        self._found: list[tuple[nn.Module, dict[str, Any]]] = []
        self._places: dict[str, _Entry] = {}
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
                    self.rest[name] = value
                    self._places[name] = _Entry(state=found, name=own)
                    continue
                one = first.setdefault(id(value), known.get(name, name))
                self.tensors.setdefault(one, value)
                if name != one:
                    self.ties[name] = one

    def names(self) -> dict[str, Tensor]:
        """List every tensor under each of its names."""
        return {**self.tensors, **{name: self.tensors[one] for name, one in self.ties.items()}}

    def set_rest(self, name: str, value: object) -> None:
        """Have ``value`` loaded as the extra state ``name``."""
        place = self._places[name]
        place.state[place.name] = value
        self.rest[name] = value

    @torch.no_grad()
    def load(self) -> None:
        """Give the modules what is in here now: values were filled in place."""
        for module, found in self._found:
            with giving_parts(module):
                module.load_state_dict(found)


# --------------------------------------------------------------------------------- optimizers


class NamedOptimizer:
    """An optimizer of parameters of ``modules``, by their plain names.

    Raises ValueError for a parameter that is not among theirs.
    """

    groups: list[list[str]]
    """The names of each group."""

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
        plain = plain_names(self._model)
        self._plain: dict[str, str] = {}
        if self._is_managed:
            names = names_by_parameter(self._model)
            listed = [[n for p in g["params"] for n in names[p]] for g in optimizer.param_groups]
            self._plain = {name: plain(name) for group in listed for name in group}
            self.groups = [[self._plain[name] for name in group] for group in listed]
        else:
            self.groups = [group["params"] for group in self.state()["param_groups"]]

    def state(self) -> dict[str, Any]:
        """List state and groups by name; all ranks call it together."""
        if not self._is_managed:
            return named_state(self._optimizer, self._model, self._named)
        with giving_parts(self._model) as settings:
            found = sharded_optimizer_state(self._model, self._optimizer, settings)
        for group in found["param_groups"]:
            group.pop("param_names", None)
        return _renamed(found, self._plain)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` gave on any layout, cut as the parameters are; all ranks together.

        The tensors of ``state`` become the optimizer's own.

        Raises CheckpointMismatchError where names or groups differ.
        """
        if not self._is_managed:
            load_named_state(self._optimizer, self._model, self._named, state, copies=False)
            return
        problems = differing_groups(self.groups, [g["params"] for g in state["param_groups"]])
        if problems:
            raise CheckpointMismatchError(
                "\n  ".join(["the saved optimizer does not fit this one:", *problems])
            )
        own = _renamed(state, {plain: name for name, plain in self._plain.items()})
        optimizer = self._optimizer
        with giving_parts(self._model) as settings:
            groups, held = optimizer.param_groups, optimizer.state
            loaded = state_to_load(self._model, groups, own, settings, held=held)
        optimizer.load_state_dict(loaded)


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    found = {names.get(name, name): values for name, values in state["state"].items()}
    return {"state": found, "param_groups": groups}
