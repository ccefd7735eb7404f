"""What ranks must have set alike for one root: its units, their parameters and their settings.

Units are compared in full when a root starts, and never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from meshwright.comm import Communicator
from meshwright.data_parallel.starting_state import compare_rows
from meshwright.data_parallel.unit import Unit, UnitSettings

if TYPE_CHECKING:
    from meshwright.data_parallel.driver import Driver

__all__ = ["compare_units"]


def compare_units(
    communicator: Communicator, drivers: Sequence[Driver], *, with_training: bool = True
) -> None:
    """Check that every rank has the same units, parameters and settings; a collective.

    ``with_training`` says whether the same parameters must require grad.

    Raises CollectiveMismatchError on every rank, naming what differs first and the ranks.
    """
    rows: list[list[Any]] = []
    for driver in drivers:
        unit = driver.unit
        if unit is None:
            rows.append([f"unit {driver.name}", "no parameters"])
            continue
        axes = unit.groups[0].axes
        sizes = [communicator.size for communicator in axes.communicators]
        rows.append([f"unit {driver.name}", type(unit.exposure).__name__, sizes, _settings(unit)])
        for group, trains in zip(unit.groups, _trains(unit), strict=True):
            dtypes = [str(d) for d in (group.types.master, group.types.compute, group.types.reduce)]
            shapes = group.buffer.layout.shapes
            for slot, shape, is_trained in zip(group.slots, shapes, trains, strict=True):
                rows.append([slot.names, list(shape), dtypes, is_trained and with_training])
    compare_rows(communicator, rows, "[name, shape, dtypes, requires_grad] or a unit with settings")


def _trains(unit: Unit) -> list[list[bool]]:
    return [unit.exposure.trains(unit, group) for group in unit.groups]


def _settings(unit: Unit) -> list[Any]:
    """The settings that are equal on ranks that do the same: functions by whether there are any."""
    settings: UnitSettings = unit.settings
    words: list[Any] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        words.append(f"{field.name}={'a function' if callable(value) else value}")
    return words
