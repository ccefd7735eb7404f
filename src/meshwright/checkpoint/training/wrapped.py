"""State of models by the names of the plain model, under any wrapper.

::

    module.layers.0._orig_mod.weight        DistributedDataParallel around a compiled block
    layers.0._fsdp_wrapped_module.weight    FullyShardedDataParallel
    layers.0.weight                         the name in a checkpoint

Values have this rank's placement: plain tensors, DTensors, views of ranges. They share the memory
of the model if its state dict does, otherwise they are copies of this rank's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.checkpoint.nested import flatten
from meshwright.comm.dtensors.dtensor import local_of
from meshwright.comm.dtensors.gather_dtensor import held
from meshwright.data_parallel.modules.checkpoint_names import (
    SteppedOver,
    place_of,
    without_compiled,
)
from meshwright.fsdp.states.methods import giving_parts
from meshwright.fsdp.traversal import clean_name

_T = TypeVar("_T")


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Make a function that removes the wrappers' components from a name in ``model``."""
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


COPY = " (copy)"
"""The suffix for a copy of a parameter that an earlier module (stage) has."""


def add(found: dict[str, _T], name: str, value: _T) -> str:
    """Add ``value`` under ``name``, with `COPY` if that is taken; returns the name used."""
    while found.setdefault(name, value) is not value:
        name += COPY
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
        """Maps other names of tied tensors to the first."""
        self.rest: dict[str, object] = {}
        """All values that are not tensors: the extra state of modules."""
        self.parameters: set[str] = set()
        """The first names of parameters."""
        self._copies: list[tuple[str, Tensor]] = []
        self._found: list[tuple[nn.Module, dict[str, Any]]] = []
        self._places: dict[str, list[_Entry]] = {}
        known = dict(ties or {})
        first: dict[int, str] = {}  # by id: `_found` keeps the values, so none is given twice
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
            other += [name for state in states[1:] if not are_alike(states[0], state)]
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
    forms = [(each.global_shape, each.boxes, each.tensor.dtype) for each in (one, two)]
    if forms[0] != forms[1]:
        return False
    bits = [each.tensor.contiguous().reshape(-1).view(torch.uint8) for each in (one, two)]
    return torch.equal(*bits)


def are_alike(one: object, other: object) -> bool:
    """Whether two states are equal, tensors bitwise."""
    (tensors, structure), (others, structured) = flatten(one, ""), flatten(other, "")
    pairs = ((name, tensor, others.get(name)) for name, tensor in tensors.items())
    return structure == structured and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and _is_copy(name, a, b)
        for name, a, b in pairs
    )
