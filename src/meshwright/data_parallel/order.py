"""In which order the units of one root run: recorded, compared with before, and between ranks.

Ranks must gather the same units in the same order, or their collectives mix up different tensors.
Three checks, from the cheapest on::

    each unit       compare with the forward before             one integer, nothing is sent
    each forward    compare a hash of the order over the ranks  16 bytes a rank, asynchronous
    first forward   exchange each unit before it is gathered    16 bytes a rank; on request

A rank that leaves its order says so on the board of `meshwright.comm.failure` before its next
collective, so that ranks that wait for it can name what it did. Where deviations are errors it then
asks the others, also through the store, whether they do the same: a change made by all ranks
together is silent and becomes the order to compare with; a change made by some is an error before
any collective of it is issued.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NoReturn

import torch

from meshwright.comm import Communicator, Pending
from meshwright.comm.failure import FailureMonitor
from meshwright.comm.registry import PROCESS
from meshwright.errors import CollectiveMismatchError

__all__ = ["OrderCheck", "OrderOptions", "OrderRecord", "OrderedUnit"]

_log = logging.getLogger("meshwright")

END = -1
"""Stands for "the forward ends here" where a unit could come."""

CONFIRMATIONS = 3
"""Changes in a row that ranks made together, after which they are not asked in advance any more."""

ON_THEIR_WAY = 8
"""Comparisons that may be pending when a forward begins; then the oldest is awaited."""

FIRST_ROLL_CALL, NEXT_ROLL_CALL = 0.1, 1.0
"""Seconds until, and between, the questions to ranks that have not come."""

AROUND = 4
"""How many units a message shows before and after the one in question."""

NEW = "a newly-added parameter since construction time"
"""Stands for the names of a unit that the check was not told of."""

REMEDY = (
    "Every rank must run the same units in the same order. Run the unit on every rank (on an empty "
    "or zero-weighted input where there is nothing to do), or leave it out of the sharded units"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedUnit:
    """What messages call a unit."""

    name: str
    parameters: tuple[str, ...] = ()
    """Qualified names of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """How a root's order is checked."""

    action: Literal["raise", "warn"] = "raise"
    """What ranks do that run different orders. ``warn`` lets mismatched collectives run on."""
    warn_at_once: bool = False
    """With ``warn``: warn as soon as this rank leaves its own order, whatever other ranks do."""
    exchange_first: bool = False
    """Exchange each unit of the first forward before it is gathered; a difference is an error."""
    every: int = 1
    """Compare hashes after every so many forwards; a comparison covers all since the last."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"expected every >= 1, found {self.every}")


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

    def differs_at(self, other: OrderRecord) -> int | None:
        """The first position where ``other`` has another unit, or has ended; None if none."""
        pairs = zip_longest(self.units, other.units, fillvalue=END)
        return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


class _Forward:
    """One forward as far as it has come."""

    __slots__ = ("exchanges", "has_ended", "number", "order", "position", "reference")

    def __init__(self, number: int, reference: OrderRecord | None, exchanges: bool) -> None:
        self.number = number
        self.reference = reference
        self.position = 0
        """Units so far."""
        self.order: list[int] | None = None if reference is not None else []
        """The units so far where they are not those of the reference; None while they are."""
        self.exchanges = exchanges
        """Whether all ranks exchange each unit before its gather."""
        self.has_ended = False

    def record(self) -> OrderRecord:
        """The units so far."""
        if self.order is not None:
            return OrderRecord(tuple(self.order))
        units = () if self.reference is None else self.reference.units
        return OrderRecord(units[: self.position])

    def expected(self, position: int) -> int:
        """The unit that the reference has at ``position``."""
        return END if self.reference is None else self.reference.at(position)

    @property
    def has_left(self) -> bool:
        """Whether it differs from the reference."""
        return self.reference is not None and self.order is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A comparison of hashes on its way."""

    pending: Pending
    rows: torch.Tensor
    """Hash and count of each rank, when it has arrived."""
    forwards: tuple[tuple[int, OrderRecord], ...]
    """The forwards it covers, with their numbers."""
    has_left: bool
    """Whether this rank had left its reference in one of them."""


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
    ) -> None:
        self._communicator = communicator
        self._rank = communicator.ranks[communicator.rank]
        self._units = tuple(units)
        self._options = OrderOptions() if options is None else options
        self._root = f" of {root}" if root else ""
        self.reference: OrderRecord | None = None
        """The order of the forward before, which the next one is compared with."""
        self.is_unchecked = False
        """Ranks were found to differ and were let go on: nothing is sent or compared any more."""
        self._now = _Forward(0, None, exchanges=False)
        self._is_active = False
        self._has_warned = False
        self._together = 0
        """Changes in a row that all ranks made together."""
        self._votes: str | None = None
        self._waiting: list[tuple[int, OrderRecord, bool]] = []
        """Forwards since the last comparison of hashes was issued."""
        self._comparisons: list[_Comparison] = []
        self._key = self._register()

    # ------------------------------------------------------------------ what the driver calls

    @property
    def iteration(self) -> int:
        """How many forwards were recorded, a running one included."""
        return self._now.number

    def begin(self, *, training: bool = True) -> None:
        """The root's forward begins. It counts in train mode with gradients enabled only."""
        self._is_active = False
        if not (training and torch.is_grad_enabled()):
            return
        while len(self._comparisons) >= ON_THEIR_WAY:
            self._compare(self._comparisons.pop(0))
        exchanges = self.reference is None and self._options.exchange_first
        self._now = _Forward(self._now.number + 1, self.reference, exchanges and not self._is_alone)
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
            now.order = [*reference.units[:position], unit]
            self._leave(position, unit)
        now.position = position + 1
        if now.exchanges:
            self._exchange(unit)
        elif self._options.warn_at_once and not self._has_warned and now.has_left:
            self._warn(position, unit)

    def end_forward(self) -> None:
        """The root's forward ends: start comparing its hash with the other ranks'."""
        if not self._is_active:
            return
        now = self._now
        now.has_ended = True
        record = now.record()
        if now.reference is not None and now.order is None:
            if now.position == len(now.reference.units):
                record = now.reference
            else:
                now.order = list(record.units)
                self._leave(now.position, END)
        if now.exchanges:
            self._exchange(END)
        self._is_active = False
        self._has_warned |= now.has_left and self._options.warn_at_once
        if not now.has_left:
            self._together = 0
        self.reference = record
        if self._is_alone or self.is_unchecked:
            return
        self._waiting.append((now.number, record, now.has_left))
        if now.number % self._options.every == 0:
            self._issue()

    def finish(self) -> None:
        """The backward ends: take in the comparisons on their way.

        Raises `CollectiveMismatchError` on every rank when the orders differed and that is an
        error; warns otherwise.
        """
        while self._comparisons:
            self._compare(self._comparisons.pop(0))

    def describe(self) -> Mapping[str, Any]:
        """Where this rank is, for peers that ask; called from the monitor's thread."""
        now = self._now
        has_ended = now.has_ended  # first: it is set behind the last unit
        units = now.record().units
        return {"iteration": now.number, "units": units, "has_ended": has_ended}

    # ------------------------------------------------------------------ this rank's own order

    @property
    def _is_alone(self) -> bool:
        return self._communicator.size == 1

    def _leave(self, position: int, unit: int) -> None:
        """This rank is about to leave its order: say so, and ask the others if that is an error."""
        monitor = PROCESS.monitor
        if self._is_alone or self.is_unchecked or monitor is None:
            return
        monitor.deviate(self._deviation(position, unit))
        if self._options.action == "raise" and self._together < CONFIRMATIONS:
            self._ask(monitor, position, unit)

    def _deviation(self, position: int, unit: int) -> str:
        return (
            f"forward {self._now.number}{self._root}, position {position}: expected "
            f"{self._called(self._now.expected(position))}, got {self._called(unit)}"
        )

    def _warn(self, position: int, unit: int) -> None:
        before = self._now.expected(position)
        if before == unit:
            return
        got = f"trying to all-gather parameters for {self._parameters(unit)}"
        change = f"Expected to not all-gather any more parameters in the forward but {got}"
        if before != END:
            change = f"Expected to all-gather for {self._parameters(before)} but {got}"
        warnings.warn(
            "Forward order differs from that of the first iteration on rank "
            f"{self._rank}. Collectives are unchecked and may give incorrect results or "
            f"hang.\n{change}",
            UserWarning,
            stacklevel=3,
        )

    # ------------------------------------------------------------------ asking the others

    def _register(self) -> str:
        """A name of this check that is equal on all ranks, under which it answers roll calls."""
        monitor = PROCESS.monitor
        if monitor is None or self._is_alone:
            return ""
        number = monitor.board.add(f"order/{self._communicator.name}/{self._rank}", 1)
        key = f"order/{self._communicator.name}/{number}"
        monitor.describers[key] = self
        return key

    def _ask(self, monitor: FailureMonitor, position: int, unit: int) -> None:
        """Wait until every rank has come to ``position``; raise when one has another unit there.

        This wait keeps nobody from coming: what the others need of this rank up to here has been
        issued. When all make the same change, they exchange the rest of this forward's units.
        """
        self._votes = f"{self._key}/{self._now.number}/{position}/{unit}"
        arrived = monitor.board.add(self._votes, 1)
        begun = time.monotonic()
        next_roll_call = begun + FIRST_ROLL_CALL
        while arrived < self._communicator.size:
            time.sleep(0.005)
            monitor.check()
            waited = time.monotonic() - begun
            if waited > self._communicator.timeout:
                self._fail(monitor, position, f"some ranks did not come there in {waited:.0f} s")
            if time.monotonic() > next_roll_call:
                self._look_at_others(monitor, position, unit)
                next_roll_call = time.monotonic() + NEXT_ROLL_CALL
            arrived = monitor.board.add(self._votes, 0)
        self._together += 1
        self._now.exchanges = True

    def _look_at_others(self, monitor: FailureMonitor, position: int, unit: int) -> None:
        """Ask every rank where it is; raise when one has another unit at ``position``."""
        answers = monitor.roll_call()
        others: list[str] = []
        for rank in self._communicator.ranks:
            theirs = answers.get(rank, {}).get("described", {}).get(self._key)
            if rank == self._rank or theirs is None or theirs["iteration"] != self._now.number:
                continue
            record = OrderRecord(tuple(theirs["units"]))
            has_come = theirs["has_ended"] or position < len(record.units)
            if has_come and record.at(position) != unit:
                others.append(f"rank {rank} has {self._called(record.at(position))}")
        if others:
            self._fail(monitor, position, "; ".join(others))

    def _fail(self, monitor: FailureMonitor, position: int, others: str) -> NoReturn:
        now = self._now
        record = now.record()
        before = "" if now.reference is None else self._drawn(now.reference, position)
        error = CollectiveMismatchError(
            f"rank {self._rank} leaves the order of units in "
            f"{self._deviation(position, record.at(position))}, where {others}. Order before: "
            f"{before}; on rank {self._rank} now: {self._drawn(record, position)}. {REMEDY}"
        )
        self._is_active = False
        monitor.publish(error, is_cause=True)
        raise error

    # ------------------------------------------------------------------ over the ranks

    def _exchange(self, unit: int) -> None:
        """Compare the next unit with the other ranks', before its gather."""
        pending, rows = self._gather(unit, self._now.position)
        pending.wait()
        found = rows[:, 0].tolist()
        other = next((at for at, theirs in enumerate(found) if theirs != found[0]), None)
        if other is None:
            return
        self._is_active = False
        self.reference = None
        texts = [
            f"rank {self._communicator.ranks[at]} "
            + (
                f"is all-gathering parameters for {self._parameters(found[at])}"
                if found[at] > END
                else "ends its forward"
            )
            for at in (0, other)
        ]
        raise CollectiveMismatchError(
            f"Forward order differs across ranks: {' while '.join(texts)}. {REMEDY}"
        )

    def _gather(self, number: int, count: int) -> tuple[Pending, torch.Tensor]:
        """Start gathering two integers of each rank, one row a rank."""
        communicator = self._communicator
        mine = torch.tensor([number, count], dtype=torch.int64, device=communicator.device)
        rows = mine.new_empty(communicator.size, 2)
        return communicator.all_gather_list(rows, mine, label="order"), rows

    def _issue(self) -> None:
        """Start comparing one hash of all forwards since the last comparison."""
        waiting = tuple(self._waiting)
        self._waiting.clear()
        digest = 0
        for _, record, _ in waiting:
            digest = record.digest(digest)
        pending, rows = self._gather(digest, len(waiting))
        self._comparisons.append(
            _Comparison(
                pending=pending,
                rows=rows,
                forwards=tuple((number, record) for number, record, _ in waiting),
                has_left=any(has_left for _, _, has_left in waiting),
            )
        )

    def _compare(self, comparison: _Comparison) -> None:
        """Take in one comparison; raise or warn when ranks differ."""
        comparison.pending.wait()
        rows = comparison.rows.tolist()
        if all(row == rows[0] for row in rows):
            self._agreed(comparison)
            return
        if self.is_unchecked:
            return
        text = self._difference(comparison)
        if self._options.action == "raise":
            self.reference = None
            self._comparisons.clear()
            raise CollectiveMismatchError(f"{text}. No optimizer has used its gradients. {REMEDY}")
        self.is_unchecked = True
        text = f"{text}. Collectives are unchecked and may give incorrect results or hang"
        if self._options.warn_at_once:
            # The ranks that left their own order have warned; the others must stay silent.
            _log.warning("rank %d: %s", self._rank, text)
        else:
            warnings.warn(text, UserWarning, stacklevel=2)

    def _agreed(self, comparison: _Comparison) -> None:
        monitor = PROCESS.monitor
        if not comparison.has_left or monitor is None:
            return
        monitor.deviate("")
        votes, self._votes = self._votes, None
        if votes is not None and self._communicator.rank == 0:
            monitor.board.delete_key(votes)

    def _difference(self, comparison: _Comparison) -> str:
        """Which units differ first and between which ranks; every rank takes part."""
        payload = json.dumps([[number, record.units] for number, record in comparison.forwards])
        everyone = [
            [(number, OrderRecord(tuple(units))) for number, units in json.loads(text)]
            for text in self._communicator.gather_bytes(payload.encode(), label="order lists")
        ]
        ranks = self._communicator.ranks
        for step in zip(*everyone, strict=False):
            number, first = step[0]
            for other, (_, record) in enumerate(step):
                at = first.differs_at(record)
                if at is not None:
                    return (
                        f"Forward order differs across ranks in forward {number}{self._root}, "
                        f"position {at}: {self._called(first.at(at))} on rank {ranks[0]}, "
                        f"{self._called(record.at(at))} on rank {ranks[other]}. Order on rank "
                        f"{ranks[0]}: {self._drawn(first, at)}; on rank {ranks[other]}: "
                        f"{self._drawn(record, at)}"
                    )
        counts = [len(forwards) for forwards in everyone]
        return (
            f"Forward order differs across ranks{self._root}: ranks {list(ranks)} ran {counts} "
            "forwards since the last comparison"
        )

    # ------------------------------------------------------------------ names

    def _called(self, unit: int) -> str:
        if unit == END:
            return "the end of the forward"
        return self._units[unit].name if unit < len(self._units) else NEW

    def _parameters(self, unit: int) -> str:
        return str(list(self._units[unit].parameters)) if unit < len(self._units) else NEW

    def _drawn(self, record: OrderRecord, position: int) -> str:
        """The units around ``position``."""
        first = max(position - AROUND, 0)
        names = [self._called(unit) for unit in record.units[first : position + AROUND + 1]]
        before = ["..."] if first else []
        after = ["..."] if position + AROUND + 1 < len(record.units) else []
        return ", ".join([*before, *names, *after]) or "nothing"
