"""What the ranks of one root must do and hold alike: units, settings, passes, order, copies.

Units and starting values are compared in full when a root starts, see `compare_units` and
`compare_values`. From then on its `Ledger` compares, from the cheapest on::

    each unit       with the forward before                     one integer, nothing is sent
    each pass       its kind and the units' settings            asked where either is new
    each forward    a hash of the order over the ranks          24 bytes a rank, on the host, and
                                                                looked at when the backward ends;
                                                                on a device one step later
    some passes     a digest of shards that are copies          8 bytes a rank of their axis, looked
                                                                at when the backward ends; taken one
                                                                pass before on a device
    some forwards   ask the other ranks before each unit        through the store once this rank has
                                                                left its order, and in the first
                                                                forward; there by a collective on
                                                                request

Ranks must gather the same units in the same order, or their collectives mix up different tensors.
Passes are events, and units are their steps, see `comm.failures.events`. A rank that leaves its
order announces it in the store before its next collective, so that ranks that wait for it can say
what it did. A change that all ranks make together is accepted silently and becomes the new order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from meshwright.comm import Communicator, union
from meshwright.comm.failures.events import END, EventCheck, GroupEvent, Turn
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.sameness import first_difference, sides, told
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.observing.late import note
from meshwright.data_parallel.checks.alignment import STOPPED, SameWeights
from meshwright.data_parallel.checks.starting_state import (
    Compared,
    compare_digests,
    require_equal_tensors,
)
from meshwright.data_parallel.shards.parameter_group import ParameterGroup, UnitSettings
from meshwright.data_parallel.shards.unit import Unit
from meshwright.errors import CollectiveMismatchError, NonFiniteError, warn
from meshwright.gradients import NonFiniteValues, agree_on_non_finite, digests_of

if TYPE_CHECKING:
    from meshwright.data_parallel.sharded_modules.module_hooks import Driver

_log = logging.getLogger("meshwright")

UNKNOWN, STEPPED, ACCUMULATES, INTERRUPTED = 0, 1, 2, 3
"""A rank's knowledge of its weights at a forward: nothing, changed since the one before, the same
although it had gradients to change them by, or half changed by a step that raised."""

STEPS = MappingProxyType(
    {
        STEPPED: "weights were changed",
        ACCUMULATES: "gradients accumulate or a step was left out",
        INTERRUPTED: "an optimizer step raised, which may have changed some weights,",
    }
)
"""The words of messages for ranks that know something of their weights."""

CONFIRMATIONS = 3
"""Changes in a row that ranks made together, after which they are not asked in advance any more."""

ON_THEIR_WAY = 8
"""Comparisons that may be pending when a forward begins; then the oldest is awaited."""

AROUND = 4
"""The number of units that a message shows before and after the one in question."""

NEW = "a newly-added parameter since construction time"
"""Stands for the names of a unit that the ledger was not told of."""

_ROW = "<3q"
"""Three integers of a rank, as they travel: a unit or a digest of some, a count or weights, and a
digest of the settings of optimizers, 0 where none is known."""

REMEDY = (
    "Every rank must run the same units in the same order. Run the unit on every rank (on an empty "
    "or zero-weighted input where there is nothing to do), or leave it out of the sharded units. "
    "Where ranks have different numbers of batches, loop in model.join()"
)

REMEMBERED = 16
"""How many states of a root keep their digests: accumulation, say, switches between two."""

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


# ------------------------------------------------------------------------------ when it starts


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
            for slot, is_trained in zip(group.slots, trains, strict=True):
                names = [*map(driver.alike, slot.names)]
                # Whole shapes: of experts, ranks may hold more or fewer.
                rows.append([names, [*slot.full.shape], dtypes, is_trained and with_training])
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
    exchanges: dict[Communicator, None] = {}
    for driver in drivers:
        for group in () if driver.unit is None else driver.unit.groups:
            replicate, exchange = group.axes.replicate, group.axes.exchange
            exchanges |= {} if exchange is None else {exchange: None}
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
    # What was found of some experts reaches the ranks of others last.
    for axis, rows in (*by_axis.items(), *((axis, ()) for axis in exchanges)):
        if not axis.is_alone:
            remedy = SAME_COPIES if axis in copying else SAME_MODEL
            difference = compare_digests(axis, rows, difference, remedy) or difference
    if difference:
        raise CollectiveMismatchError(difference)


def _trains(unit: Unit) -> list[list[bool]]:
    return [unit.exposure.trains(unit, group) for group in unit.groups]


def _settings(unit: Unit) -> list[Any]:
    """The settings that must agree across ranks; of functions, only whether there are any."""
    return [f"{name}={_word(getattr(unit.settings, name))}" for name in _NAMES]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Non-finite gradients of this rank, found when the sums of sharded units have ended."""

    flags: tuple[bool, ...] = ()
    """One flag for the other ranks: True where something was found; none if not asked for."""
    found: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    axes: tuple[Communicator, ...] = ()
    """The axes whose ranks know that one of them has found something."""

    @classmethod
    def of(cls, units: Sequence[Unit]) -> NonFinite:
        """Collect what was found in ``units``, which are watched and not yet delivered."""
        values: list[str] = []
        sums = NonFiniteValues()
        for unit in reversed(units):
            values += unit.found_non_finite
            for group in unit.trainable_groups:
                if group.mean is not None:
                    named = [(f"unit {unit.name!r}", group.mean)]
                    sums.look(group.mean, partial(list, named))
        found = tuple(f"the gradient of {name!r}" for name in values)
        in_sums = tuple(sums.names())
        return cls(flags=(bool(found or in_sums),), found=found, sums=in_sums)

    def error(self) -> NonFiniteError:
        """Make the error that every rank of `axes` raises; collective."""
        return agree_on_non_finite(union(self.axes), self.found, what=STOPPED, sums=self.sums)


# ---------------------------------------------------------------------------------- each pass


class UnitStates:
    """The settings of all units of a root, with a digest that is cheap while nothing changes."""

    def __init__(self, drivers: Sequence[Driver], *, with_training: bool = True) -> None:
        self._drivers = tuple(drivers)
        self._with_training = with_training
        self._settings: list[UnitSettings | None] = [None] * len(self._drivers)
        self._values: list[tuple[object, ...]] = [()] * len(self._drivers)
        self._digests: dict[tuple[object, ...], int] = {}
        """By the facts that decide the collectives, driver by driver."""

    def digest(self) -> int:
        """A 63-bit digest that is equal on ranks with equal settings.

        Read in every forward: cheap while the objects are the same.
        """
        rows: list[tuple[object, ...]] = []
        for number, driver in enumerate(self._drivers):
            unit = driver.unit
            if unit is None:
                rows.append(())
                continue
            settings = unit.settings
            if settings is not self._settings[number]:
                self._settings[number] = settings
                # Hooks among them may be new objects in each step: only their presence counts.
                self._values[number] = tuple([_word(getattr(settings, name)) for name in _NAMES])
            ahead, behind = driver.forward_ahead, driver.backward_ahead
            row: list[object] = [
                self._values[number],
                unit.changes,
                None if ahead is None else tuple(ahead),
                None if behind is None else tuple(behind),
            ]
            for group in unit.groups:
                row += unit.exposure.trains(unit, group)
            rows.append(tuple(row))
        now = tuple(rows)
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


def copies_of(drivers: Sequence[Driver]) -> dict[Communicator, SameWeights]:
    """The shards that ranks hold as copies, by the axis that replicates them, with their names."""

    def groups() -> list[tuple[Driver, ParameterGroup]]:
        return [(each, g) for each in drivers if each.unit is not None for g in each.unit.groups]

    def held(axis: Communicator) -> list[tuple[str, torch.Tensor]]:
        return [
            (driver.alike(slot.name), group.buffer.own(index))
            for driver, group in groups()
            if group.axes.replicate == axis
            for index, slot in enumerate(group.slots)
        ]

    axes = dict.fromkeys(group.axes.replicate for _, group in groups())
    return {
        axis: SameWeights(partial(held, axis))
        for axis in axes
        if axis is not None and not axis.is_alone
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedUnit:
    """A unit, with the names that messages use for it."""

    name: str
    parameters: tuple[str, ...] = ()
    """Qualified names of its parameters."""
    payload: tuple[int, ...] = ()
    """Bytes that this rank gives to each of its gathers: equal counts are silently mixed up."""


class _Forward(NamedTuple):
    """A training forward, as it is compared across ranks."""

    number: int
    reference: Sequence[int] | None
    """The units of the forward before, in order."""
    weights: int
    """The state of the weights before it, see `UNKNOWN`."""
    settings: Sequence[str]
    """The settings by which optimizers had changed them, one text for each group."""
    turn: Turn
    """The event that it is; its steps are the units that have run so far, in order."""


class Ledger(EventCheck):
    """The passes and units of one root on this rank, and its copies of shards, checked.

    The root calls ``begin_pass`` before each forward, ``begin`` when it records units, ``record``
    for each unit before its gather, ``end_forward``, ``happens`` before the backward, ``finish``
    when that ends, before an optimizer can run, and ``judge_copies`` before a step.
    ``communicator`` spans the ranks, at least two, that train the root together; all number its
    ``units`` alike. The next ``begin`` discards a forward that raised.

    ``in_detail`` gives the behavior of torch's class under debug level DETAIL: each unit of the
    first forward is exchanged before it is gathered, and a difference raises. A rank that leaves
    its order later warns at once and continues, which may mix up units of equal size. Different
    weights, and a collective that could only hang, raise in any case.
    """

    def __init__(
        self,
        communicator: Communicator,
        units: Sequence[OrderedUnit],
        *,
        in_detail: bool = False,
        root: str = "",
        states: UnitStates | None = None,
        copies: Mapping[Communicator, SameWeights] = MappingProxyType({}),
        axes: Sequence[Communicator] = (),
    ) -> None:
        super().__init__(communicator, root, dict if states is None else states.describe, axes)
        self._units = tuple(units)
        self._states = states
        self._was_training: bool | None = None
        self._copies = copies
        self._sent: list[tuple[Communicator, Callable[[], bytes]]] = []
        """Digests of copies on their way, over these axes."""
        self._is_in_detail = in_detail
        self.reference: Sequence[int] | None = None
        """The units of the forward before, which the next one is compared with."""
        self.is_unchecked = False
        """True when ranks differ and were let continue: nothing is sent or compared any more."""
        self._is_late = not communicator.is_on_host
        """True when the host is ahead of what it has started, and looks at nothing of this step."""
        self._noted = f"order {id(self)}"
        self._due = 0
        """Comparisons that were there when the last backward ended."""
        self.forwards = 0
        self._now: _Forward | None = None
        """The forward in training that runs."""
        self._is_in_graph = False
        self._asks = self._has_left = self._has_warned = False
        """True when other ranks are asked before each unit; when this forward differs from the one
        before on this rank; when that was said."""
        self._together = 0
        """Forwards in a row that left the order of the one before."""
        self._votes: list[str] = []
        """Keys on the board that all ranks have passed, to be deleted."""
        self._comparisons: list[tuple[Callable[[], bytes], _Forward, bool]] = []
        """Hashes on their way, each with its forward and whether that left the order before it."""

    # ------------------------------------------------------------------ what the root calls

    def begin_pass(self, what: str, *, training: bool, after: str) -> None:
        """Announce a forward, or a step that a schedule drives; ``after`` a pass that raised.

        In evaluation nothing depends on settings, and ranks enter and leave it together.
        """
        settings = self._states.digest() if training and self._states is not None else 0
        turns = training is not self._was_training
        self.happens(GroupEvent(what, settings), asks=turns, after=after)
        self._was_training = training
        if training and self._copies:
            self._compare_copies()
            for axis, check in self._copies.items():
                check.begin_pass()
                if number := check.number():
                    digest = struct.pack("<d", number)
                    self._sent.append((axis, axis.start_equal(digest, "compare copies")))

    def begin(
        self, *, training: bool = True, weights: int = UNKNOWN, settings: Sequence[str] = ()
    ) -> None:
        """Begin the announced forward; only units of a ``training`` forward are recorded.

        ``weights`` says whether an optimizer has stepped since the previous forward, and
        ``settings`` holds the optimizer's settings, where known.
        """
        if self._now is not None:
            self._now.turn.has_ended, self._now = True, None
        if not training:
            return
        while len(self._comparisons) >= ON_THEIR_WAY:
            self._compare_next()
        self.forwards += 1
        self._has_left, self._asks = False, self.reference is None
        self._now = _Forward(self.forwards, self.reference, weights, settings, self._turns[-1])

    def record(self, unit: int) -> None:
        """Record that unit number ``unit`` runs next; call it before its gather is issued.

        Raises `CollectiveMismatchError`, before anything is issued for the unit, when other ranks
        run another unit here and that is an error.
        """
        now = self._now
        if now is None:
            return
        units, reference = now.turn.steps, now.reference
        position = len(units)
        units.append(unit)
        # Not by `_at`: this runs for each unit of each step.
        is_as_before = reference is None or reference[position : position + 1] == [unit]
        if not is_as_before and not self._has_left:
            self._leave(now, position)
        if self._asks:
            self._ask_step(now, position)
        if self._is_in_detail and self._has_left and not self._has_warned:
            self._warn(now, position)

    def begin_graph(self, what: str) -> None:
        """Announce ``what`` a compiled graph is about to do within this forward."""
        self._is_in_graph = True
        try:
            self.happens(GroupEvent(what))
        finally:
            self._is_in_graph = False

    def end_forward(self) -> None:
        """End the root's forward: start to compare its hash with the other ranks'."""
        now = self._now
        if now is None:
            return
        position, now.turn.has_ended = len(now.turn.steps), True
        if now.reference is not None and not self._has_left and position < len(now.reference):
            self._leave(now, position)
        if self._asks:
            self._ask_step(now, position)
        self._now, self.reference = None, now.turn.steps
        self._has_warned |= self._has_left and self._is_in_detail
        self._together = self._together + 1 if self._has_left else 0
        if self.is_unchecked:
            return
        settings = 0
        for text in now.settings:  # a sum: optimizers in the backward step in no order
            settings += 1 + zlib.crc32(text.encode())
        row = struct.pack(_ROW, digest_of(now.turn.steps), now.weights, settings)
        started = self.communicator.start_equal(row, "order")
        self._comparisons.append((started, now, self._has_left))

    def finish(self) -> None:
        """End the backward: judge the comparisons in flight (on a device only the older orders).

        Raises `CollectiveMismatchError` on every rank when the orders differed and that is an
        error, and as `SameWeights.doubt` says.
        """
        for _ in range(self._due if self._is_late else len(self._comparisons)):
            self._compare_next()
        self._due = len(self._comparisons)
        if self._due:
            note(self, self._noted)
        if self._sent:
            self._compare_copies()

    def judge_copies(self) -> None:
        """Compare copies in doubt before an optimizer step."""
        for check in self._copies.values():
            check.judge()

    def settle(self) -> None:
        """Judge all comparisons in flight. Raises as `finish` does."""
        PROCESS.outstanding.pop(self._noted, None)
        while self._comparisons:
            self._compare_next()

    # ------------------------------------------------------------------ this rank's own order

    def _leave(self, now: _Forward, position: int) -> None:
        """Announce that this rank is about to leave its order, and ask the others from now on."""
        self._has_left = True
        if self._is_in_detail:
            # Such a rank warns and continues; differing labels would raise in its next collective.
            for axis in self._axes:
                axis.forgo_labels()
        if self.is_unchecked or PROCESS.monitor is None:
            return
        PROCESS.monitor.deviate(self._deviation(now, position))
        self._asks = self._together < CONFIRMATIONS

    def _deviation(self, now: _Forward, position: int) -> str:
        expected = ""
        if now.reference is not None:
            expected = f"expected {self._named(_at(now.reference, position))}, "
        got = self._named(_at(now.turn.steps, position))
        return f"forward {now.number}, position {position}: {expected}got {got}"

    def _warn(self, now: _Forward, position: int) -> None:
        before, unit = _at(now.reference or (), position), now.turn.steps[position]
        if before == unit:
            return
        got = f"trying to all-gather parameters for {self._parameters(unit)}"
        change = f"Expected to not all-gather any more parameters in the forward but {got}"
        if before != END:
            change = f"Expected to all-gather for {self._parameters(before)} but {got}"
        warn(
            "Forward order differs from that of the first iteration on rank "
            f"{self._rank}. Collectives are unchecked and may give incorrect results or "
            f"hang.\n{change}"
        )

    def _named(self, unit: int) -> str:
        if unit == END:
            return "the end of the forward"
        return self._units[unit].name if unit < len(self._units) else NEW

    def _parameters(self, unit: int) -> str:
        return str(list(self._units[unit].parameters)) if unit < len(self._units) else NEW

    def _drawn(self, units: Sequence[int], position: int) -> str:
        """Name the units around ``position``."""
        first = max(position - AROUND, 0)
        names = [self._named(unit) for unit in units[first : position + AROUND + 1]]
        before = ["..."] if first else []
        after = ["..."] if position + AROUND + 1 < len(units) else []
        return ", ".join([*before, *names, *after]) or "nothing"

    # ------------------------------------------------------------------ asking the others

    def _ask_step(self, now: _Forward, position: int) -> None:
        """Compare the next unit with the other ranks'; raise before it is gathered if they differ.

        In a first forward this can be a collective, on request. Otherwise it goes through the
        store, because ranks that have not left their order do not take part.
        """
        monitor = PROCESS.monitor
        if self._is_in_detail and now.reference is None:
            self._exchange(_at(now.turn.steps, position), position)
        elif monitor is not None:
            self._votes.append(self._ask(monitor, now.turn, position))

    def _exchange(self, unit: int, position: int) -> None:
        """Compare the next unit with the other ranks', before its gather."""
        row = struct.pack(_ROW, unit, position, 0)
        rows = struct.iter_unpack(_ROW, self.communicator.start_equal(row, "order")())
        found = sides(self.communicator.ranks, [theirs for theirs, *_ in rows])
        if len(found) == 1:
            return
        self._now = self.reference = None
        texts = [
            f"rank {ranks[0]} "
            + (
                f"is all-gathering parameters for {self._parameters(other)}"
                if other > END
                else "ends its forward"
            )
            for other, ranks in [*found.items()][:2]
        ]
        raise CollectiveMismatchError(
            f"Forward order differs across ranks: {' while '.join(texts)}. {REMEDY}"
        )

    def shown(self, turn: Turn, position: int | None) -> str:
        """Name a pass or a unit for reports."""
        if position is None:
            return super().shown(turn, position)
        unit = self._named(_at(turn.steps, position))
        return f"{unit}, position {position} of forward {self.forwards} of {self.root}"

    def _instead(self, turns: Mapping[int, Turn]) -> str:
        """Name the unit that a rank of these ``turns`` runs instead of a graph."""
        here = self._now.turn if self._now is not None and self._is_in_graph else None
        theirs = None if here is None else turns.get(here.number)
        unit = None if here is None or theirs is None else theirs.at(len(here.steps))
        return "" if unit is None else f"{self._named(unit)}, outside of a compiled graph,"

    def _compare_steps(
        self, monitor: FailureMonitor, turn: Turn, position: int, steps: Mapping[int, int]
    ) -> None:
        """Raise for ranks that run another unit; ``in_detail`` only if collectives would fail.

        There, units that could merely mix up are no error.
        """
        now, unit = self._now, _at(turn.steps, position)
        others = {rank: other for rank, other in steps.items() if other != unit}
        if now is None or not others:
            return
        if self._is_in_detail and all(self._may_mix(unit, other) for other in others.values()):
            return
        said = told(others, map(self._named, others.values()))
        orders = f"Order on rank {self._rank}: {self._drawn(now.turn.steps, position)}"
        if now.reference is not None:
            orders += f"; in the forward before: {self._drawn(now.reference, position)}"
        error = CollectiveMismatchError(
            f"Forward order differs across ranks: rank {self._rank} in "
            f"{self._deviation(now, position)}, while it is {said}. {orders}. {REMEDY}"
        )
        self._now = None
        monitor.publish(error, is_cause=True)
        raise error

    def _may_mix(self, unit: int, other: int) -> bool:
        """Whether the gathers of two units could be matched by mistake, with wrong results."""
        if END in (unit, other):
            return unit == other
        known = range(len(self._units))
        return (
            unit not in known
            or other not in known
            or (self._units[unit].payload == self._units[other].payload)
        )

    # ------------------------------------------------------------------ over the ranks

    def _compare_copies(self) -> None:
        """Compare the digests of weights that were sent over each axis.

        Raises the error that `SameWeights.doubt` returns where they differ, if it returns one.
        """
        while self._sent:
            axis, started = self._sent.pop(0)
            if len(set(struct.iter_unpack("<d", started()))) > 1:
                error = self._copies[axis].doubt(axis)
                if error is not None:
                    self._sent.clear()
                    raise error

    def _compare_next(self) -> None:
        """Judge the oldest comparison; raise when ranks differ and that is an error."""
        started, forward, has_left = self._comparisons.pop(0)
        self._due = max(self._due - 1, 0)
        rows = struct.iter_unpack(_ROW, started())
        digests, weights, settings = zip(*rows, strict=True)
        if len({*digests}) == 1 and len({*weights} - {UNKNOWN}) < 2 and len({*settings} - {0}) < 2:
            if has_left or self._votes:
                self._agreed(has_left=has_left)
            return
        if self.is_unchecked:
            return
        try:
            text = self._difference(forward)
        except CollectiveMismatchError:
            self.reference = None
            self._comparisons.clear()
            self._due = 0
            raise
        self.is_unchecked = True
        # The ranks that left their own order have warned; the others must stay silent.
        _log.warning("rank %d: %s", self._rank, text)

    def _agreed(self, *, has_left: bool) -> None:
        monitor = PROCESS.monitor
        if monitor is None:
            return
        if has_left:
            monitor.deviate("")
        if self.communicator.rank == 0:
            for votes in self._votes:
                monitor.board.delete_key(votes)
                monitor.board.delete_key(f"{votes}/all")
        self._votes.clear()

    def _difference(self, forward: _Forward) -> str:
        """Describe the first difference in ``forward`` and its ranks. Every rank takes part.

        Raises CollectiveMismatchError where the weights differ, since every later step would use
        them, and otherwise unless ``in_detail``.
        """
        used = "One step of an optimizer may have" if self._is_late else "No optimizer has"
        used = f". {used} used its gradients"
        mine = [forward.turn.steps, forward.weights, sorted(forward.settings)]
        everyone = self.communicator.gather_values(mine, label="order lists")
        ranks = self.communicator.ranks
        steps = {r: STEPS[known] for r, (_, known, _) in zip(ranks, everyone, strict=True) if known}
        if len(set(steps.values())) > 1:
            raise CollectiveMismatchError(
                f"Optimizer steps differ across ranks: before forward {forward.number} "
                f"{told(steps, steps.values())}. Run as many passes for each "
                f"optimizer step on every rank, and skip a step on all ranks or on none{used}"
            )
        said = {r: texts for r, (*_, texts) in zip(ranks, everyone, strict=True) if texts}
        found = first_difference([*said], [*said.values()])
        if found is not None:
            at = int(found.place)
            steps = {r: each[at] if at < len(each) else "no more" for r, each in said.items()}
            raise CollectiveMismatchError(
                f"Settings of optimizers differ across ranks: before forward {forward.number} "
                f"steps were made by {told(steps, steps.values())}. Each rank "
                "has changed its parts of the weights by its own: resume from a state of "
                "before. Set them alike on every rank, and schedule by what all ranks know, "
                "such as a loss that was reduced"
            )
        orders = [units for units, *_ in everyone]
        found = first_difference(ranks, orders)
        at = 0 if found is None else int(found.place)
        text = (
            f"Forward order differs across ranks in forward {forward.number}, position {at}: "
            f"{told(ranks, [self._named(_at(units, at)) for units in orders])}. "
            f"Order: {told(ranks, [self._drawn(units, at) for units in orders])}"
        )
        if not self._is_in_detail:
            raise CollectiveMismatchError(f"{text}{used}. {REMEDY}")
        return text


def digest_of(units: Sequence[int]) -> int:
    """Hash an order to 63 bits: a number below `END`, different from any unit's."""
    payload = array("q", [len(units), *units]).tobytes()
    number = hashlib.blake2b(payload, digest_size=8).digest()
    return END - 1 - (int.from_bytes(number, "little") >> 2)


def _at(units: Sequence[int], position: int) -> int:
    """The unit at ``position``, or `END` past the last."""
    return units[position] if position < len(units) else END
