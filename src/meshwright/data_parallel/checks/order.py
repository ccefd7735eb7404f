"""The order in which the units of one root run: recorded, and compared between ranks.

Ranks must gather the same units in the same order, or their collectives mix up different tensors.
Checks, from the cheapest on::

    each unit       compare with the forward before             one integer, nothing is sent
    each forward    compare a hash of the order over the ranks  24 bytes a rank, on the host, and
                                                                looked at when the backward ends;
                                                                on a device one step later
    some forwards   ask the other ranks before each unit        through the board once this rank has
                                                                left its order, and in the first
                                                                forward where a difference is an
                                                                error; there by a collective on
                                                                request

The board is that of `comm.failures.failure`. A rank that leaves its order says so there before
its next collective, so that ranks that wait for it can name what it did. A change that all ranks
make together is silent and becomes the order to compare with.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from meshwright.comm import Communicator
from meshwright.comm.failures.events import Coming, Registration, wait_for_all
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.liveness import Answers
from meshwright.comm.failures.sameness import first_difference, sides, told
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.observing.late import note
from meshwright.data_parallel.checks.order_record import (
    ACCUMULATES,
    END,
    INTERRUPTED,
    STEPPED,
    UNKNOWN,
    EndedForward,
    Forward,
    OrderedUnit,
    OrderRecord,
    UnitNames,
)
from meshwright.errors import CollectiveMismatchError, warn

_log = logging.getLogger("meshwright")

CONFIRMATIONS = 3
"""Changes in a row that ranks made together, after which they are not asked in advance any more."""

ON_THEIR_WAY = 8
"""Comparisons that may be pending when a forward begins; then the oldest is awaited."""

STEPS = MappingProxyType(
    {
        STEPPED: "weights were changed",
        ACCUMULATES: "gradients accumulate or a step was left out",
        INTERRUPTED: "an optimizer step raised, which may have changed some weights,",
    }
)
"""The words of messages for ranks that know something of their weights."""

_ROW = "<3q"
"""Three integers of a rank, as they travel: a unit or a digest of some, a count or weights, and a
digest of the settings of optimizers, 0 where none is known."""

REMEDY = (
    "Every rank must run the same units in the same order. Run the unit on every rank (on an empty "
    "or zero-weighted input where there is nothing to do), or leave it out of the sharded units. "
    "Where ranks have different numbers of batches, loop in model.join()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """The options of the check of a root's order."""

    in_detail: bool = False
    """As torch's class under debug level DETAIL: each unit of the first forward is exchanged before
    it is gathered, where a difference raises. A rank that leaves its order later warns at once and
    continues, which may mix up units of equal size; weights that differ, and a collective that
    could only hang, raise all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A comparison of hashes in flight."""

    started: Callable[[], bytes]
    """Waits for a `_ROW` of each rank."""
    ended: EndedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The first difference between ranks, in words."""

    text: str
    is_of_weights: bool = True
    """True when it is an error in any case: every step after it would use the weights."""
    was_used: bool = False
    """True when optimizers have made the steps that differ."""


class OrderCheck:
    """The execution order of one root's units on this rank, checked against the other ranks.

    The driver calls ``begin``, ``record`` for each unit before its gather, ``end_forward``, and
    ``finish`` when the backward ends, before an optimizer can run. ``communicator`` spans all ranks
    that train the root together, which number its units alike. A forward that is left by an
    exception is forgotten by the next ``begin``.
    """

    def __init__(
        self,
        communicator: Communicator,
        units: Sequence[OrderedUnit],
        options: OrderOptions | None = None,
        *,
        root: str = "",
        axes: Sequence[Communicator] = (),
    ) -> None:
        """``axes`` are all communicators through which the units send."""
        self._communicator = communicator
        self._rank = communicator.ranks[communicator.rank]
        self._names = UnitNames(units)
        self._axes = axes
        self._options = OrderOptions() if options is None else options
        self._root = f" of {root}" if root else ""
        self.reference: OrderRecord | None = None
        """The order of the forward before, which the next one is compared with."""
        self.is_unchecked = False
        """True when ranks differ and were let continue: nothing is sent or compared any more."""
        self._is_late = not communicator.is_on_host
        """True when the host is ahead of what it has started, and looks at nothing of this step."""
        self._noted = f"order {id(self)}"
        self._due = 0
        """Comparisons that were there when the last backward ended."""
        self._now = Forward(0, None)
        self._is_active = False
        self._has_warned = False
        self._together = 0
        """Forwards in a row that left the order of the one before."""
        self._votes: list[str] = []
        """Keys on the board that all ranks have passed, to be deleted."""
        self._comparisons: list[_Comparison] = []
        self._key = Registration("order", communicator, self)

    # ------------------------------------------------------------------ what the driver calls

    def begin(
        self, *, training: bool = True, weights: int = UNKNOWN, settings: Sequence[str] = ()
    ) -> None:
        """Begin the root's forward. It counts in train mode with gradients enabled only.

        ``weights`` tells whether an optimizer has stepped since the forward before, and
        ``settings`` by what numbers, where that is known.
        """
        self._is_active = False
        if not (training and torch.is_grad_enabled()):
            return
        while len(self._comparisons) >= ON_THEIR_WAY:
            self._compare_next()
        number, asks = self._now.number + 1, self.reference is None
        self._now = Forward(number, self.reference, asks, weights, settings)
        self._is_active = True

    def record(self, unit: int) -> None:
        """Unit number ``unit`` runs next; call it before its gather is issued.

        Raises `CollectiveMismatchError` when other ranks run another unit here and that is an
        error, before anything has been issued for the unit.
        """
        if not self._is_active:
            return
        now = self._now
        position, order, reference = now.position, now.order, now.reference
        if order is not None:
            order.append(unit)
        elif reference is not None and reference.at(position) != unit:
            now.leave([*reference.units[:position], unit])
            self._leave(position, unit)
        now.position = position + 1
        if now.asks:
            self._ask(position, unit)
        if self._options.in_detail and not self._has_warned and now.has_left:
            self._warn(position, unit)

    def end_forward(self) -> None:
        """End the root's forward: start comparing its hash with the other ranks'."""
        if not self._is_active:
            return
        now = self._now
        record = now.end()
        if now.reference is not None and now.order is None:
            if now.position == len(now.reference.units):
                record = now.reference
            else:
                now.leave(list(record.units))
                self._leave(now.position, END)
        if now.asks:
            self._ask(now.position, END)
        self._is_active = False
        self._has_warned |= now.has_left and self._options.in_detail
        self._together = self._together + 1 if now.has_left else 0
        self.reference = record
        if self._communicator.is_alone or self.is_unchecked:
            return
        self._issue(EndedForward(now.number, record, now.weights, now.settings, now.has_left))

    def finish(self) -> None:
        """End the backward: judge the comparisons in flight, on a device only older ones.

        Raises `CollectiveMismatchError` on every rank when the orders differed and that is an
        error.
        """
        for _ in range(self._due if self._is_late else len(self._comparisons)):
            self._compare_next()
        self._due = len(self._comparisons)
        if self._due:
            note(self, self._noted)

    def settle(self) -> None:
        """Judge all comparisons in flight. Raises as `finish` does."""
        PROCESS.outstanding.pop(self._noted, None)
        while self._comparisons:
            self._compare_next()

    def passed(self, answer: Mapping[str, Any]) -> str:
        """Name the unit at which the rank that says ``answer`` is here; "" where it is at none."""
        position = self._now.position
        record = self._record(answer, position) if self._is_active else None
        return "" if record is None else self._names.of(record.at(position))

    def describe(self) -> Mapping[str, Any]:
        """Describe the place of this rank to peers that ask; called from the monitor's thread."""
        now = self._now
        has_ended = now.has_ended  # first: it is set behind the last unit
        found = {
            "iteration": now.number,
            "units": now.record().units,
            "has_ended": has_ended,
        }
        if now.reference is not None:
            found["before"] = now.reference.units
        return found

    # ------------------------------------------------------------------ this rank's own order

    def _leave(self, position: int, unit: int) -> None:
        """Announce that this rank is about to leave its order, and ask the others from here on."""
        if self._options.in_detail:
            for axis in self._axes:
                axis.forgo_labels()
        if self._communicator.is_alone or self.is_unchecked or PROCESS.monitor is None:
            return
        PROCESS.monitor.deviate(self._deviation(position, unit))
        self._now.ask(self._together < CONFIRMATIONS)

    def _ask(self, position: int, unit: int) -> None:
        """Compare the next unit with the other ranks'; raise before it is gathered if they differ.

        In a first forward this can be a collective, on request. Else it goes through the board,
        because ranks that have not left their order do not take part.
        """
        if self._communicator.is_alone:
            return
        monitor = PROCESS.monitor
        if self._options.in_detail and self._now.reference is None:
            self._exchange(unit)
        elif monitor is not None:
            self._vote(monitor, position, unit)

    def _deviation(self, position: int, unit: int) -> str:
        expected = ""
        if self._now.reference is not None:
            expected = f"expected {self._names.of(self._now.expected(position))}, "
        return (
            f"forward {self._now.number}{self._root}, position {position}: {expected}got "
            f"{self._names.of(unit)}"
        )

    def _warn(self, position: int, unit: int) -> None:
        before = self._now.expected(position)
        if before == unit:
            return
        got = f"trying to all-gather parameters for {self._names.parameters(unit)}"
        change = f"Expected to not all-gather any more parameters in the forward but {got}"
        if before != END:
            change = f"Expected to all-gather for {self._names.parameters(before)} but {got}"
        warn(
            "Forward order differs from that of the first iteration on rank "
            f"{self._rank}. Collectives are unchecked and may give incorrect results or "
            f"hang.\n{change}"
        )

    # ------------------------------------------------------------------ asking the others

    def _vote(self, monitor: FailureMonitor, position: int, unit: int) -> None:
        """Wait until every rank has come to ``position``; raise when one has another unit there.

        In detail it is an error only where the collectives would break and not just mix up.
        """
        number = self._now.number
        votes = f"{self._key}/{number}/{position}/{unit}"
        self._votes.append(votes)
        coming = Coming(
            communicator=self._communicator,
            place=f"{self._names.of(unit)}, position {position} of forward {number}{self._root}",
            name=f"{self._key}/{number}/{position}",
            come=lambda answer: self._record(answer, position) is not None,
        )
        wait_for_all(monitor, votes, coming, partial(self._have_come, monitor, position, unit))

    def _have_come(
        self, monitor: FailureMonitor, position: int, unit: int, answers: Answers
    ) -> bool:
        """Whether all ranks have come to ``position``, where ranks that stay do not vote.

        Raises when one has another unit there and that is an error.
        """
        units: dict[int, int] = {}
        for rank in self._communicator.ranks:
            record = None if rank == self._rank else self._record(answers.get(rank), position)
            if record is not None:
                units[rank] = record.at(position)
        others = {rank: other for rank, other in units.items() if other != unit}
        mix = all(self._names.may_mix(unit, other) for other in others.values())
        if others and not (self._options.in_detail and mix):
            self._fail(monitor, position, told(others, map(self._names.of, others.values())))
        return len(units) == self._communicator.size - 1

    def _record(self, answer: Mapping[str, Any] | None, position: int) -> OrderRecord | None:
        """The order of another rank, by its ``answer``; None before it comes to ``position``."""
        match None if answer is None else answer["described"].get(str(self._key)):
            case {"iteration": int(number), "units": list(units), "has_ended": has_ended, **more}:
                ahead = number - self._now.number
                if ahead == 1:
                    return OrderRecord(tuple(more.get("before", ())))
                if ahead == 0 and (has_ended or position < len(units)):
                    return OrderRecord(tuple(units))
        return None

    def _fail(self, monitor: FailureMonitor, position: int, others: str) -> NoReturn:
        now = self._now
        record = now.record()
        here = f"{self._deviation(position, record.at(position))}, while it is {others}"
        orders = f"Order on rank {self._rank}: {self._names.drawn(record, position)}"
        if now.reference is not None:
            orders += f"; in the forward before: {self._names.drawn(now.reference, position)}"
        error = CollectiveMismatchError(
            f"Forward order differs across ranks: rank {self._rank} in {here}. {orders}. {REMEDY}"
        )
        self._is_active = False
        monitor.publish(error, is_cause=True)
        raise error

    # ------------------------------------------------------------------ over the ranks

    def _exchange(self, unit: int) -> None:
        """Compare the next unit with the other ranks', before its gather."""
        everyones = self._start(unit, self._now.position)()
        rows = struct.iter_unpack(_ROW, everyones)
        found = sides(self._communicator.ranks, [theirs for theirs, *_ in rows])
        if len(found) == 1:
            return
        self._is_active = False
        self.reference = None
        texts = [
            f"rank {ranks[0]} "
            + (
                f"is all-gathering parameters for {self._names.parameters(other)}"
                if other > END
                else "ends its forward"
            )
            for other, ranks in [*found.items()][:2]
        ]
        raise CollectiveMismatchError(
            f"Forward order differs across ranks: {' while '.join(texts)}. {REMEDY}"
        )

    def _start(self, number: int, count: int, settings: int = 0) -> Callable[[], bytes]:
        """Start to gather the integers of each rank, a `_ROW`."""
        return self._communicator.start_equal(struct.pack(_ROW, number, count, settings), "order")

    def _issue(self, ended: EndedForward) -> None:
        """Start comparing one hash of the forward."""
        # A sum: optimizers in the backward step in no order.
        settings = sum(1 + zlib.crc32(text.encode()) for text in ended.settings)
        started = self._start(ended.order.digest(), ended.weights, settings)
        self._comparisons.append(_Comparison(started=started, ended=ended))

    def _compare_next(self) -> None:
        """Judge the oldest comparison; raise when ranks differ and that is an error."""
        comparison = self._comparisons.pop(0)
        self._due = max(self._due - 1, 0)
        rows = struct.iter_unpack(_ROW, comparison.started())
        digests, weights, settings = zip(*rows, strict=True)
        if len({*digests}) == 1 and len({*weights} - {UNKNOWN}) < 2 and len({*settings} - {0}) < 2:
            self._agreed(comparison)
            return
        if self.is_unchecked:
            return
        found = self._difference(comparison)
        if found.is_of_weights or not self._options.in_detail:
            self.reference = None
            self._comparisons.clear()
            self._due = 0
            used = "One step of an optimizer may have" if self._is_late else "No optimizer has"
            after = "" if found.was_used else f". {used} used its gradients"
            remedy = "" if found.is_of_weights else f". {REMEDY}"
            raise CollectiveMismatchError(f"{found.text}{after}{remedy}")
        self.is_unchecked = True
        # The ranks that left their own order have warned; the others must stay silent.
        _log.warning("rank %d: %s", self._rank, found.text)

    def _agreed(self, comparison: _Comparison) -> None:
        monitor = PROCESS.monitor
        if monitor is None:
            return
        if comparison.ended.has_left:
            monitor.deviate("")
        if self._communicator.rank == 0:
            for votes in self._votes:
                monitor.board.delete_key(votes)
                monitor.board.delete_key(f"{votes}/all")
        self._votes.clear()

    def _difference(self, comparison: _Comparison) -> _Difference:
        """Describe what differs first, with its ranks. Every rank takes part."""
        ended = comparison.ended
        mine = [ended.order.units, ended.weights, sorted(ended.settings)]
        everyone = self._communicator.gather_values(mine, label="order lists")
        ranks, names = self._communicator.ranks, self._names
        steps = {r: STEPS[known] for r, (_, known, _) in zip(ranks, everyone, strict=True) if known}
        if len(set(steps.values())) > 1:
            return _Difference(
                text=f"Optimizer steps differ across ranks: before forward {ended.number}"
                f"{self._root} {told(steps, steps.values())}. Run as many passes for each "
                "optimizer step on every rank, and skip a step on all ranks or on none"
            )
        said = {r: texts for r, (*_, texts) in zip(ranks, everyone, strict=True) if texts}
        found = first_difference([*said], [*said.values()])
        if found is not None:
            at = int(found.place)
            steps = {r: each[at] if at < len(each) else "no more" for r, each in said.items()}
            return _Difference(
                text=f"Settings of optimizers differ across ranks: before forward {ended.number}"
                f"{self._root} steps were made by {told(steps, steps.values())}. Each rank "
                "has changed its parts of the weights by its own: resume from a state of "
                "before. Set them alike on every rank, and schedule by what all ranks know, "
                "such as a loss that was reduced",
                was_used=True,
            )
        records = [OrderRecord(tuple(units)) for units, *_ in everyone]
        found = first_difference(ranks, [record.units for record in records])
        at = 0 if found is None else int(found.place)
        return _Difference(
            text=f"Forward order differs across ranks in forward {ended.number}{self._root}, "
            f"position {at}: {told(ranks, [names.of(record.at(at)) for record in records])}. "
            f"Order: {told(ranks, [names.drawn(record, at) for record in records])}",
            is_of_weights=False,
        )
