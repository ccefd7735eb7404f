"""A `Slot`: one parameter of a unit, with all its uses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import AtRest
from meshwright.data_parallel.checks.starting_state import Start
from meshwright.data_parallel.distributed_parameters import LocalParameter
from meshwright.data_parallel.shards.placement import Place
from meshwright.data_parallel.shards.tensor_extensions import Extension

__all__ = ["Slot", "collect_slots", "group_slots"]


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """One parameter of a unit and everywhere it is used."""

    names: list[str]
    """Full names, one for each place."""
    places: list[tuple[nn.Module, str]]
    """The modules and attributes that hold it."""
    original: nn.Parameter
    """The parameter that the module held when it was taken over; its storage is given up then."""
    full: nn.Parameter = field(init=False)
    """What modules hold while it is gathered: the same object for good, with memory then."""
    leaf: nn.Parameter = field(init=False)
    """The plain parameter that computes; ``full`` itself unless that is a DTensor whose modules
    take the leaf over its local tensor."""
    local: torch.Tensor | None = None
    """This rank's chunk where it is not cut from ``original``; taken by the next group."""
    place: Place | None = None
    """Its place, for one that is more than a part of a line."""
    outer: AtRest | None = None
    """The DTensor of which it was this rank's part, where it was one."""
    computes: LocalParameter = field(default_factory=LocalParameter)
    """The form in which it computes: a DTensor, unless all its modules take a local tensor."""
    is_spread: bool = False
    """True where modules of other units use it too."""
    given: weakref.ref[nn.Parameter] | None = None
    """The parameter object that the user had, as long as somebody holds it."""
    version: int = 0
    """That of ``leaf`` when modules were shown it."""
    trains: bool = True
    """True where ``full`` required grad then."""

    extension: Extension | None = None
    """The way of its gather, for a tensor subclass that has one of its own."""
    start: Start | None = None
    """Digests of when it was sharded, until they are compared over the ranks."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def show(self, parameter: nn.Parameter | torch.Tensor) -> None:
        """Put ``parameter`` into every module that holds this one."""
        for module, name in self.places:
            # Not setattr: the order of the names has to stay, and this is on the hot path.
            module._parameters[name] = parameter  # pyrefly: ignore[unsupported-operation]


def collect_slots(
    modules: Iterable[tuple[str, nn.Module]], ignored: Iterable[torch.Tensor] = ()
) -> list[Slot]:
    """The parameters that ``modules`` (with their full names) hold themselves, each once."""
    skipped = {id(parameter) for parameter in ignored}
    slots: dict[int, Slot] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            slot = slots.get(id(parameter))
            if slot is None:
                slots[id(parameter)] = Slot(
                    names=[full_name],
                    places=[(module, name)],
                    original=parameter,
                    given=weakref.ref(parameter),
                )
            else:
                slot.names.append(full_name)
                slot.places.append((module, name))
    return list(slots.values())


def group_slots(slots: Iterable[Slot], *, by_training: bool = True) -> list[list[Slot]]:
    """Slots that can share a buffer: one dtype, and all trainable or all frozen by default."""
    groups: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        is_trainable = slot.original.requires_grad or not by_training
        groups.setdefault((slot.original.dtype, is_trainable), []).append(slot)
    return list(groups.values())
