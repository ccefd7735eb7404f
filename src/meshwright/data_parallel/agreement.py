"""What ranks must have set alike for one root: its units, their parameters and their settings.

Units are compared in full when a root starts. What is set is compared again, through
`meshwright.data_parallel.events`, in the first forward pass after it has changed on a rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from meshwright.comm import Communicator
from meshwright.data_parallel.starting_state import compare_rows
from meshwright.data_parallel.unit import Unit, UnitSettings

if TYPE_CHECKING:
    from meshwright.data_parallel.driver import Driver

__all__ = ["UnitStates", "compare_units"]

REMEMBERED = 16
"""States of a root whose digests are kept: accumulation changes to and from one, for instance."""

_NAMES = tuple(field.name for field in fields(UnitSettings))

Essence = tuple[tuple[object, ...], ...]
"""What decides the collectives, driver by driver."""


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
        sizes = [axis.size for axis in unit.communicators]
        rows.append([f"unit {driver.name}", type(unit.exposure).__name__, sizes, _settings(unit)])
        for group, trains in zip(unit.groups, _trains(unit), strict=True):
            dtypes = [str(d) for d in (group.types.master, group.types.compute, group.types.reduce)]
            shapes = group.buffer.layout.shapes
            for slot, shape, is_trained in zip(group.slots, shapes, trains, strict=True):
                rows.append([slot.names, list(shape), dtypes, is_trained and with_training])
    compare_rows(communicator, rows, "[name, shape, dtypes, requires_grad] or a unit with settings")


class UnitStates:
    """The settings of all units of a root, with a digest that is cheap while nothing changes."""

    def __init__(self, drivers: Sequence[Driver], *, with_training: bool = True) -> None:
        self._drivers = tuple(drivers)
        self._with_training = with_training
        self._settings: list[UnitSettings | None] = [None] * len(self._drivers)
        self._values: list[tuple[object, ...]] = [()] * len(self._drivers)
        self._digests: dict[Essence, int] = {}

    def digest(self) -> int:
        """63 bits that are equal on ranks with equal settings."""
        now = self._essence()
        found = self._digests.get(now)
        if found is None:
            text = json.dumps(self.describe(), sort_keys=True).encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            found = int.from_bytes(digest, "little") >> 1
            if len(self._digests) >= REMEMBERED:
                self._digests.clear()
            self._digests[now] = found
        return found

    def describe(self) -> dict[str, list[Any]]:
        """What is set, unit by unit, in words."""
        found: dict[str, list[Any]] = {}
        for driver in self._drivers:
            unit = driver.unit
            if unit is None:
                continue
            words: list[Any] = _settings(unit)
            words += [f"{group.slots[0].name} in {group.types.master}" for group in unit.groups]
            for when, ahead in (
                ("forward", driver.forward_ahead),
                ("backward", driver.backward_ahead),
            ):
                if ahead is not None:
                    words.append(f"gathers {[other.name for other in ahead]} ahead in the {when}")
            if not self._with_training:
                found[driver.name] = words
                continue
            for group, trains in zip(unit.groups, _trains(unit), strict=True):
                words += [
                    f"{slot.name} {'trainable' if is_trained else 'frozen'}"
                    for slot, is_trained in zip(group.slots, trains, strict=True)
                ]
            found[driver.name] = words
        return found

    def _essence(self) -> Essence:
        """In every forward: cheap where settings are the objects of before."""
        rows: list[tuple[object, ...]] = []
        for number, driver in enumerate(self._drivers):
            unit = driver.unit
            if unit is None:
                rows.append(())
                continue
            settings = unit.settings
            if settings is not self._settings[number]:
                self._settings[number] = settings
                values = (getattr(settings, name) for name in _NAMES)
                # Some are functions that are made anew in each step.
                self._values[number] = tuple(_word(value) for value in values)
            ahead, behind = driver.forward_ahead, driver.backward_ahead
            trains = [tuple(unit.exposure.trains(unit, group)) for group in unit.groups]
            rows.append(
                (
                    self._values[number],
                    unit.changes,
                    None if ahead is None else tuple(ahead),
                    None if behind is None else tuple(behind),
                    *trains,
                )
            )
        return tuple(rows)


def _trains(unit: Unit) -> list[list[bool]]:
    return [unit.exposure.trains(unit, group) for group in unit.groups]


def _settings(unit: Unit) -> list[Any]:
    """The settings that are equal on ranks that do the same: functions by whether there are any."""
    settings: UnitSettings = unit.settings
    words: list[Any] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        words.append(f"{field.name}={_word(value)}")
    return words


def _word(value: object) -> object:
    """What ranks can have alike of one setting: whether there is a function, not which."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{value.size} ranks" if isinstance(value, Communicator) else "a function"
