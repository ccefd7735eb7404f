"""Values of the order of units: one forward's record, a forward under way, what messages say."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

END = -1
"""Stands for "the forward ends here" where a unit could come."""

UNKNOWN, STEPPED, ACCUMULATES, INTERRUPTED = 0, 1, 2, 3
"""A rank's knowledge of its weights at a forward: nothing, changed since the one before, the same
although it had gradients to change them by, or half changed by a step that raised."""

AROUND = 4
"""The number of units that a message shows before and after the one in question."""

NEW = "a newly-added parameter since construction time"
"""Stands for the names of a unit that the check was not told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedUnit:
    """The names by which messages call a unit."""

    name: str
    parameters: tuple[str, ...] = ()
    """Qualified names of its parameters."""
    payload: tuple[int, ...] = ()
    """Bytes that this rank gives to each of its gathers: equal counts are silently mixed up."""


@dataclass(frozen=True, slots=True)
class OrderRecord:
    """The units of one forward, in order."""

    units: tuple[int, ...]

    def digest(self, before: int = 0) -> int:
        """63 bits of a hash chained to the digest ``before``: below `END`, unlike any unit."""
        payload = array("q", [before, len(self.units), *self.units]).tobytes()
        number = hashlib.blake2b(payload, digest_size=8).digest()
        return END - 1 - (int.from_bytes(number, "little") >> 2)

    def at(self, position: int) -> int:
        """The unit at ``position``, or `END` behind the last."""
        return self.units[position] if position < len(self.units) else END


class EndedForward(NamedTuple):
    """One forward that has ended, as it is compared over the ranks."""

    number: int
    order: OrderRecord
    weights: int
    """The state of the weights before it, see `UNKNOWN`."""
    settings: Sequence[str]
    """The settings by which optimizers had changed them, one text for each group."""
    has_left: bool
    """True when it differs from the forward before on this rank."""


class Forward:
    """One forward as far as it has come."""

    __slots__ = (
        "asks",
        "has_ended",
        "number",
        "order",
        "position",
        "reference",
        "settings",
        "weights",
    )

    def __init__(
        self,
        number: int,
        reference: OrderRecord | None,
        asks: bool = False,
        weights: int = UNKNOWN,
        settings: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.weights = weights
        """The state of the weights since the forward before, see `UNKNOWN`."""
        self.settings = settings
        """The settings by which optimizers have changed them, one text for each group."""
        self.reference = reference
        self.position = 0
        """Units so far."""
        self.order: list[int] | None = None if reference is not None else []
        """The units so far where they are not those of the reference; None while they are."""
        self.asks = asks
        """True when the other ranks are asked before each unit."""
        self.has_ended = False

    def leave(self, order: list[int]) -> None:
        """Keep an order of its own, which begins as ``order``."""
        self.order = order

    def ask(self, asks: bool) -> None:
        """Ask the other ranks before each unit from here on, or do not."""
        self.asks = asks

    def end(self) -> OrderRecord:
        """End the forward, and return the record of its units."""
        self.has_ended = True
        return self.record()

    def record(self) -> OrderRecord:
        """Make a record of the units so far."""
        if self.order is not None:
            return OrderRecord(tuple(self.order))
        units = () if self.reference is None else self.reference.units
        return OrderRecord(units[: self.position])

    def expected(self, position: int) -> int:
        """The unit that the reference has at ``position``."""
        return END if self.reference is None else self.reference.at(position)

    @property
    def has_left(self) -> bool:
        """True when it differs from the reference."""
        return self.reference is not None and self.order is not None


class UnitNames:
    """The words of messages for units and orders."""

    def __init__(self, units: Sequence[OrderedUnit]) -> None:
        self._units = tuple(units)

    def of(self, unit: int) -> str:
        """The unit's own name, or that the forward ends."""
        if unit == END:
            return "the end of the forward"
        return self._units[unit].name if unit < len(self._units) else NEW

    def parameters(self, unit: int) -> str:
        """The names of its parameters."""
        return str(list(self._units[unit].parameters)) if unit < len(self._units) else NEW

    def may_mix(self, unit: int, other: int) -> bool:
        """Whether the gathers of two units could pass for each other, with wrong results."""
        if END in (unit, other):
            return unit == other
        known = range(len(self._units))
        return (
            unit not in known
            or other not in known
            or (self._units[unit].payload == self._units[other].payload)
        )

    def drawn(self, record: OrderRecord, position: int) -> str:
        """The names of the units around ``position``."""
        first = max(position - AROUND, 0)
        names = [self.of(unit) for unit in record.units[first : position + AROUND + 1]]
        before = ["..."] if first else []
        after = ["..."] if position + AROUND + 1 < len(record.units) else []
        return ", ".join([*before, *names, *after]) or "nothing"
