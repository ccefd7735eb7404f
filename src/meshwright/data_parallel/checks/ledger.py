"""The ledger of one root: checks that all ranks run the same passes, with units in the same order.

Ranks must gather the same units in the same order, or their collectives mix up different tensors.
The checks, cheapest first::

    each unit       compare with the forward before             one integer, nothing is sent
    each forward    compare a hash of the order over the ranks  24 bytes a rank, on the host, and
                                                                looked at when the backward ends;
                                                                on a device one step later
    some forwards   ask the other ranks before each unit        through the store once this rank has
                                                                left its order, and in the first
                                                                forward; there by a collective on
                                                                request

Passes are events, and units are their steps, see `comm.failures.events`. A rank that leaves its
order announces it in the store before its next collective, so that ranks that wait for it can say
what it did. A change that all ranks make together is accepted silently and becomes the new order.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from meshwright.comm import Communicator
from meshwright.comm.failures.events import END, EventCheck, GroupEvent, State, Turn
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.sameness import first_difference, sides, told
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.observing.late import note
from meshwright.errors import CollectiveMismatchError, warn

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
    """The event that it is; its steps are the units so far."""

    @property
    def units(self) -> Sequence[int]:
        """The units that have run, in order."""
        return self.turn.steps


class Ledger(EventCheck):
    """The passes and units of one root on this rank, checked against the other ranks.

    The root calls ``happens`` before each pass, ``begin`` when that is a forward, ``record`` for
    each unit before its gather, ``end_forward``, and ``finish`` when the backward ends, before an
    optimizer can run. ``communicator`` spans the ranks, at least two, that train the root together;
    all number its ``units`` alike. The next ``begin`` discards a forward that raised.

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
        state: Callable[[], State] = dict,
        axes: Sequence[Communicator] = (),
    ) -> None:
        super().__init__(communicator, root, state, axes)
        self._units = tuple(units)
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
        position, now.turn.has_ended = len(now.units), True
        if now.reference is not None and not self._has_left and position < len(now.reference):
            self._leave(now, position)
        if self._asks:
            self._ask_step(now, position)
        self._now, self.reference = None, now.units
        self._has_warned |= self._has_left and self._is_in_detail
        self._together = self._together + 1 if self._has_left else 0
        if self.is_unchecked:
            return
        settings = 0
        for text in now.settings:  # a sum: optimizers in the backward step in no order
            settings += 1 + zlib.crc32(text.encode())
        started = self._start(digest_of(now.units), now.weights, settings)
        self._comparisons.append((started, now, self._has_left))

    def finish(self) -> None:
        """End the backward: judge the comparisons in flight (on a device only the older ones).

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
        got = self._named(_at(now.units, position))
        return f"forward {now.number}, position {position}: {expected}got {got}"

    def _warn(self, now: _Forward, position: int) -> None:
        before, unit = _at(now.reference or (), position), now.units[position]
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
            self._exchange(_at(now.units, position), position)
        elif monitor is not None:
            self._votes.append(self._ask(monitor, now.turn, position))

    def _exchange(self, unit: int, position: int) -> None:
        """Compare the next unit with the other ranks', before its gather."""
        rows = struct.iter_unpack(_ROW, self._start(unit, position)())
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
        orders = f"Order on rank {self._rank}: {self._drawn(now.units, position)}"
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

    def _start(self, number: int, count: int, settings: int = 0) -> Callable[[], bytes]:
        """Start to gather the integers of each rank (a `_ROW`)."""
        return self.communicator.start_equal(struct.pack(_ROW, number, count, settings), "order")

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
        mine = [forward.units, forward.weights, sorted(forward.settings)]
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
