"""The settings of one root that must agree across ranks: units, their parameters and options.

Units are compared in full when a root starts. Settings are compared again, through
`meshwright.comm.failures.events`, in the first forward pass after a rank has changed them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.data_parallel.checks.same_weights import SameWeights
from meshwright.data_parallel.checks.starting_state import (
    Compared,
    compare_digests,
    require_equal_tensors,
)
from meshwright.data_parallel.shards.parameter_group import UnitSettings
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import CollectiveMismatchError
from meshwright.gradients import digests_of

if TYPE_CHECKING:
    from meshwright.data_parallel.sharded_modules.module_hooks import Driver

REMEMBERED = 16
"""How many states of a root keep their digests: accumulation, say, switches between two."""

LABEL = "compare copies"

NAMED = 20
"""The most parameters that an error names."""

SAME_MODEL = (
    "Each rank would keep parts of a model of its own. Seed all ranks alike, or load the same "
    "state on all of them, before the model is sharded; or pass sync_module_states=True, which "
    "takes what rank 0 has; or load a state dict into the sharded model. A buffer that is each "
    "rank's own is registered with persistent=False"
)
SAME_COPIES = (
    "These are copies of one part, and would train apart. Initialize or load them alike on ranks "
    "that hold the same part, or pass sync_module_states=True where the model is sharded"
)

_NAMES = tuple(field.name for field in fields(UnitSettings))

Essence = tuple[tuple[object, ...], ...]
"""The facts that decide the collectives, driver by driver."""


def compare_units(
    communicator: Communicator, drivers: Sequence[Driver], *, with_training: bool = True
) -> None:
    """Check that every rank has the same units, parameters and settings; a collective.

    ``with_training`` also compares which parameters require grad.

    Raises CollectiveMismatchError on every rank, naming the first difference and the ranks.
    """
    rows: list[list[Any]] = []
    for driver in drivers:
        unit, name = driver.unit, driver.alike(driver.name)
        if unit is None:
            rows.append([f"unit {name}", "no parameters"])
            continue
        sizes = [axis.size for axis in unit.communicators]
        rows.append([f"unit {name}", type(unit.exposure).__name__, sizes, _settings(unit)])
        for group, trains in zip(unit.groups, _trains(unit), strict=True):
            dtypes = [str(d) for d in (group.types.master, group.types.compute, group.types.reduce)]
            shapes = group.buffer.layout.shapes
            for slot, shape, is_trained in zip(group.slots, shapes, trains, strict=True):
                names = [*map(driver.alike, slot.names)]
                rows.append([names, list(shape), dtypes, is_trained and with_training])
    meaning = "[name, shape, dtypes, requires_grad] or a unit with settings"
    require_equal_tensors(communicator, rows, meaning)


def compare_values(drivers: Sequence[Driver], names: Mapping[nn.Module, str]) -> None:
    """Check that all ranks have started from the same values; a collective for each axis.

    Values that an axis shards are compared as they were when sharded, unless written since; values
    that it replicates, as they are now. ``names`` are those of modules.

    Raises CollectiveMismatchError on every rank, naming the first difference and the ranks.
    """
    by_axis: dict[Communicator, list[tuple[str, Compared]]] = {}
    copying: set[Communicator] = set()
    for driver in drivers:
        for group in () if driver.unit is None else driver.unit.groups:
            replicate = group.axes.replicate
            nows = digests_of([group.buffer.own(index) for index in range(len(group.slots))])
            for slot, now in zip(group.slots, nows, strict=True):
                start, slot.start = slot.start, None
                (module, attribute), name = slot.places[0], slot.name
                if module in names:
                    name = driver.clean(f"{names[module]}.{attribute}".lstrip("."))
                name = driver.alike(name)
                compared = None
                if start is not None and now is not None:
                    compared = start[0], start[1], now
                for axis in group.axes.communicators:
                    by_axis.setdefault(axis, []).append((name, compared))
                if replicate is not None and now is not None:
                    copying.add(replicate)
                    by_axis[replicate].append((name, (now, now, now)))
        buffers, driver.buffers = driver.buffers, ()
        nows = digests_of([buffer.tensor for buffer in buffers])
        for buffer, now in zip(buffers, nows, strict=True):
            name = driver.clean(f"{names.get(buffer.module, '')}.{buffer.name}".lstrip("."))
            name = driver.alike(name)
            for axis in buffer.axes:
                row = name, None if now is None else (buffer.start, buffer.start, now)
                by_axis.setdefault(axis, []).append(row)
    difference = ""
    for axis, rows in by_axis.items():
        if not axis.is_alone:
            remedy = SAME_COPIES if axis in copying else SAME_MODEL
            difference = compare_digests(axis, rows, difference, remedy)
    if difference:
        raise CollectiveMismatchError(difference)


class SameCopies:
    """Compares the shards that ranks hold as copies, over each replicating axis.

    Digests are sent when a forward begins, and read when its backward ends; on a device one pass
    later.
    """

    def __init__(self, drivers: Sequence[Driver]) -> None:
        groups = [g for each in drivers if each.unit is not None for g in each.unit.groups]
        axes = dict.fromkeys(group.axes.replicate for group in groups)
        self.checks = {
            axis: SameWeights(partial(_parts, drivers, axis))
            for axis in axes
            if axis is not None and not axis.is_alone
        }
        """By each axis that has copies."""
        self._coming: list[tuple[Communicator, Callable[[], bytes]]] = []

    def begin_pass(self) -> None:
        """Count a training forward, and send the digests that are due."""
        self.finish()
        for axis, check in self.checks.items():
            check.begin_pass()
            if number := check.number():
                self._coming.append((axis, axis.start_equal(struct.pack("<d", number), LABEL)))

    def finish(self) -> None:
        """Compare what was sent. Raises CollectiveMismatchError as `SameWeights.doubt` does."""
        while self._coming:
            axis, started = self._coming.pop(0)
            said = started()
            if len(set(struct.iter_unpack("<d", said))) > 1:
                error = self.checks[axis].doubt(axis)
                if error is not None:
                    self._coming.clear()
                    raise error

    def judge(self) -> None:
        """Compare copies in doubt before an optimizer step."""
        for check in self.checks.values():
            check.judge()


def _parts(drivers: Sequence[Driver], axis: Communicator) -> list[tuple[str, torch.Tensor]]:
    """This rank's shards of the parameters that are replicated over ``axis``, with their names."""
    return [
        (driver.alike(slot.name), group.buffer.own(index))
        for driver in drivers
        for group in (() if driver.unit is None else driver.unit.groups)
        if group.axes.replicate == axis
        for index, slot in enumerate(group.slots)
    ]


class UnitStates:
    """The settings of all units of a root, with a digest that is cheap while nothing changes."""

    def __init__(self, drivers: Sequence[Driver], *, with_training: bool = True) -> None:
        self._drivers = tuple(drivers)
        self._with_training = with_training
        self._settings: list[UnitSettings | None] = [None] * len(self._drivers)
        self._values: list[tuple[object, ...]] = [()] * len(self._drivers)
        self._digests: dict[Essence, int] = {}

    def digest(self) -> int:
        """A 63-bit digest that is equal on ranks with equal settings."""
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
        """Describe the settings in words, unit by unit."""
        found: dict[str, list[Any]] = {}
        for driver in self._drivers:
            unit, alike = driver.unit, driver.alike
            if unit is None:
                continue
            words: list[Any] = _settings(unit)
            words += [
                f"{alike(group.slots[0].name)} in {group.types.master}" for group in unit.groups
            ]
            for when, ahead in (
                ("forward", driver.forward_ahead),
                ("backward", driver.backward_ahead),
            ):
                if ahead is not None:
                    ahead_of_it = [alike(other.name) for other in ahead]
                    words.append(f"gathers {ahead_of_it} ahead in the {when}")
            if not self._with_training:
                found[alike(driver.name)] = words
                continue
            for group, trains in zip(unit.groups, _trains(unit), strict=True):
                words += [
                    f"{alike(slot.name)} {'trainable' if is_trained else 'frozen'}"
                    for slot, is_trained in zip(group.slots, trains, strict=True)
                ]
            found[alike(driver.name)] = words
        return found

    def _essence(self) -> Essence:
        """The current settings, read in every forward: cheap while the objects are the same."""
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
                # Hooks among them may be new objects in each step: only their presence counts.
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
    """The settings that must agree across ranks; of functions, only whether there are any."""
    settings: UnitSettings = unit.settings
    words: list[Any] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        words.append(f"{field.name}={_word(value)}")
    return words


def _word(value: object) -> object:
    """A setting in a form that ranks can compare; for a function only that there is one."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{value.size} ranks" if isinstance(value, Communicator) else "a function"


def check_meta(drivers: Iterable[Driver]) -> None:
    """Raise RuntimeError when parameters are still on the meta device."""
    units = [driver.unit for driver in drivers if driver.unit is not None]
    found = [[s.name for g in u.groups if g.buffer.shard.is_meta for s in g.slots] for u in units]
    if any(found):
        starts = accumulate(map(len, found), initial=0)
        listed = [own[: max(NAMED - at, 0)] for own, at in zip(found, starts, strict=False)]
        names = ", ".join(str(own) for own in listed if own)  # those of each unit in a list
        more = sum(map(len, found)) - NAMED
        rest = f" and {more} more" if more > 0 else ""
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {names}{rest}. Call "
            "module.to_empty(device=...), and initialize the parameters"
        )
