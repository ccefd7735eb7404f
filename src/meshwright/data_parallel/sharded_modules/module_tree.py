"""Watches the modules of one root for parameters that were added after sharding.

A module that is added or replaced later, such as an adapter, brings parameters that no unit holds:
each rank would silently train them alone. The same holds for tensors in the former memory of a
unit's parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.data_parallel.shards.replaced_parameters import rank_in, refuse_views
from meshwright.data_parallel.shards.unit import Unit

STATES = "_meshwright_states"
"""The attribute of a module that says which composable functions were applied to it."""

PlacesIn = Collection[tuple[nn.Module, str]]
"""The modules and attributes that hold parameters."""


def places_in(modules: Iterable[nn.Module], parameters: Collection[int]) -> PlacesIn:
    """Find which of ``modules`` hold the ``parameters``, given by ``id``, and by which names."""
    return frozenset(
        (module, name)
        for module in modules
        for name, parameter in module._parameters.items()
        if id(parameter) in parameters
    )


class ModuleTree:
    """The modules below ``root``, as they were at the last check."""

    def __init__(
        self,
        root: nn.Module,
        ignored: PlacesIn,
        unit_of: Callable[[nn.Module], Unit | None],
        clean: Callable[[str], str],
    ) -> None:
        """``unit_of`` maps a module to its unit, and ``clean`` gives the names that users know."""
        self._root = root
        self._unit_of = unit_of
        self._clean = clean
        self._ignored = ignored
        self._seen: list[tuple[dict[str, Any], list[int], dict[str, Any], int]] = []
        """Of each module: its children, their identities, its parameters, how many those are."""
        self._frozen: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """Parameters that no unit holds, and their places."""
        self.verify()

    def verify(self) -> None:
        """Raise RuntimeError if a parameter trains that no unit holds; usually cheap."""
        is_same = bool(self._seen)
        for children, known, parameters, count in self._seen:
            if [*map(id, children.values())] != known or len(parameters) != count:
                is_same = False
                break
        for parameters, name, parameter in self._frozen:
            if parameters.get(name) is not parameter or parameter.requires_grad:
                is_same = False
        if not is_same:
            self._look_through()

    def _look_through(self) -> None:
        modules = list(_reduced_here(self._root))
        units = {u: None for _, module in modules if (u := self._unit_of(module)) is not None}
        slots = [slot for unit in units for slot in unit.slots]
        places = {place for slot in slots for place in slot.places}
        flat = {id(unit.exposure.one_flat) for unit in units}
        seen: list[tuple[dict[str, Any], list[int], dict[str, Any], int]] = []
        self._seen.clear()  # a caller that catches the error is told again
        self._frozen.clear()
        for path, module in modules:
            children, parameters = module._modules, module._parameters
            seen.append((children, [*map(id, children.values())], parameters, len(parameters)))
            for name, parameter in parameters.items():
                is_held = (module, name) in places or id(parameter) in flat
                if parameter is None or is_held or (module, name) in self._ignored:
                    continue
                if parameter.requires_grad:
                    rank = rank_in(next((unit.communicators for unit in units), ()))
                    raise self._nobody_reduces(f"{path}.{name}", module, parameter, rank)
                self._frozen.append((parameters, name, parameter))
        refuse_views(self._root.modules(), slots)
        self._seen = seen

    def _nobody_reduces(
        self, path: str, module: nn.Module, parameter: nn.Parameter, rank: int
    ) -> RuntimeError:
        return RuntimeError(
            f"rank {rank}: parameter {self._clean(path.lstrip('.'))!r} of shape "
            f"{tuple(parameter.shape)}, in a {type(module).__name__}, trains and belongs to no "
            "unit of the sharded model: it came later, and each rank would train it alone. Add and "
            "replace modules, such as adapters, before the model is sharded, or shard the new "
            "module too, or freeze it (requires_grad_(False))"
        )


def _reduced_here(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the modules below ``root`` with their names, except those under `replicate`."""
    seen: set[nn.Module] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if module in seen or "replicate" in module.__dict__.get(STATES, {}):
            continue
        seen.add(module)
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                waiting.append((f"{path}.{name}" if path else name, child))
