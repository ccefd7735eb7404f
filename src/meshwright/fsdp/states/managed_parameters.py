"""The parameters of a model as its wrappers' units manage them, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshwright.data_parallel.shards.unit import ParameterGroup, Unit
from meshwright.fsdp.exposures.exposure import exposed_of
from meshwright.fsdp.traversal import clean_name
from meshwright.fsdp.unit_wrapper import UnitWrapper, wrappers_in

__all__ = ["Managed", "managed_parameters", "names_by_parameter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Managed:
    """One parameter of the model as a part of a unit."""

    group: ParameterGroup
    index: int
    names: tuple[str, ...]
    exposed: nn.Parameter
    """What the optimizer holds: its own object, or the flat parameter of its unit."""
    is_flat: bool
    wrapper: UnitWrapper


def managed_parameters(model: nn.Module) -> list[Managed]:
    """List all parameters that units manage, in order."""
    found: list[Managed] = []
    prefixes = {module: clean_name(name) for name, module in model.named_modules()}
    for wrapper in wrappers_in(model):
        unit = wrapper._unit
        if unit is None:
            continue
        prefix = prefixes[wrapper]
        found += _of_unit(wrapper, unit, f"{prefix}." if prefix else "")
    return found


def _of_unit(wrapper: UnitWrapper, unit: Unit, prefix: str) -> list[Managed]:
    is_flat = unit.exposure.one_flat is not None
    exposed = exposed_of(unit).parameters(unit)
    names = iter(wrapper._driver.own_names)
    positions = [(group, index) for group in unit.groups for index in range(len(group.slots))]
    return [
        Managed(
            group=group,
            index=index,
            names=tuple(prefix + name for name in next(names)),
            exposed=exposed[0] if is_flat else exposed[number],
            is_flat=is_flat,
            wrapper=wrapper,
        )
        for number, (group, index) in enumerate(positions)
    ]


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """List the names that stand for each exposed parameter: several for a flat one."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for entry in managed_parameters(model):
        found[entry.exposed] = (*found.get(entry.exposed, ()), entry.names[0])
    for name, parameter in model.named_parameters():
        found.setdefault(parameter, (clean_name(name),))
    return found
