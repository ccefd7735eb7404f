"""Events of a root on this rank, one after another, compared with the other ranks.

Forward and backward passes issue collectives. A rank that runs one pass more or less, or another
kind, would match them with those of another pass. A rank knows by itself when it does something
new::

    the two events before, and this one       known: continue, nothing is sent
                                              new, or another mode: ask the other ranks first
    after a pass that raised                  ask, and continue only if every rank has issued as
                                              many collectives: others hang in a skipped one

An event may have steps, as a forward pass has its units, see `Ledger` of `data_parallel`. Ranks ask
through the board of `comm.failures.failure`, before any collective is issued: a different answer is
an error on the rank that asks, and the others read it while they wait. Asking later would be too
late: Gloo ends the process at a gather to which another rank gives more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from meshwright.comm.collectives import Communicator
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.liveness import Answers, Describer, Need
from meshwright.comm.failures.sameness import first_difference
from meshwright.comm.failures.store import ALL, Gathering
from meshwright.comm.failures.waiting import Awaited, BoundedWait
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import CollectiveMismatchError, CommunicationError, RankFailedError

FIRST_ROLL_CALL, NEXT_ROLL_CALL = 0.1, 1.0
"""Seconds until, and between, the questions to ranks that have not come."""

REMEMBERED = 8
"""Events that a rank can still be asked about."""

END = -1
"""Stands for "the event ends here" where a step could come."""

REMEDY = (
    "Every rank must run the same passes with the same settings: as many forward and backward "
    "passes, all in training or all in evaluation, all with or all without a reduction, with the "
    "same parameters frozen, in the same compiled graphs or in none. Where batches of evaluation "
    "are not equally many, evaluate the plain module"
)

State = Mapping[str, list[Any]]
"""The state that decides collectives, by unit: settings first, then frozen parameters."""


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """An event that all ranks take part in."""

    text: str
    state: int = 0
    """A digest of the units' settings, where the event depends on them."""
    shown: str = field(default="", compare=False)
    """More words for reports of this rank."""


@dataclass(slots=True, eq=False)
class Turn:
    """An event of one rank, and its steps so far."""

    number: int
    event: GroupEvent
    issued: Sequence[int]
    """Collectives that the rank had issued on each axis before it, also of control data."""
    steps: list[int] = field(default_factory=list)
    has_ended: bool = False
    """True when no step follows any more; set after the last one, for other threads."""

    def at(self, position: int) -> int | None:
        """Return the step at ``position``, `END` past the last; None if it is yet to come."""
        if position < len(self.steps):
            return self.steps[position]
        return END if self.has_ended else None


class _Told(NamedTuple):
    """Another rank's answer about the same root."""

    turns: Mapping[int, Turn]
    state: State
    issued: Sequence[int]

    def has_come(self, number: int, position: int | None = None) -> bool:
        """Check whether that rank has reached event ``number``, or a step of it."""
        if position is not None and number in self.turns:
            return self.turns[number].at(position) is not None
        return any(at >= number for at in self.turns)


class EventCheck:
    """The events of one root on this rank. ``state`` describes the settings, unit by unit.

    ``axes`` are all communicators on which the root sends, in the same order on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        root: str,
        state: Callable[[], State],
        axes: Sequence[Communicator] = (),
    ) -> None:
        self.communicator = communicator
        self._rank = communicator.ranks[communicator.rank]
        self.root = root
        self._state = state
        self._axes = tuple(axes)
        self._turns: tuple[Turn, ...] = ()
        """The last events, the current one at the end."""
        self._last: tuple[GroupEvent | None, GroupEvent | None] = (None, None)
        self._known: set[tuple[GroupEvent | None, ...]] = set()
        self._said: Gathering | None = None
        """The last words of all ranks."""
        self.key = Registration("events", communicator, self)

    def happens(
        self, event: GroupEvent, *, asks: bool = False, after: str = "", if_new: str = ""
    ) -> None:
        """Record ``event`` as next, and compare it if it is new; call before its collectives.

        ``after`` names the pass that raised on this rank just before, if one did or may have;
        ``if_new`` names it for an event that is new.

        Raises `CollectiveMismatchError` when another rank does something else (detected for an
        event that has never followed the two before it, or with ``asks``), and when another rank
        waits in a collective that this one left out.
        """
        if self.communicator.is_alone:
            return
        turn = self._take_turn(event)
        three = (*self._last, event)
        self._last = (self._last[1], event)
        monitor, is_new = PROCESS.monitor, three not in self._known
        if monitor is not None and (asks or after or is_new):
            self._ask(monitor, turn, after=after or (if_new if is_new else ""))
            self._known.add(three)

    def exchange(self, event: GroupEvent, said: str) -> list[str]:
        """Exchange short texts of all ranks at the next ``event``, in rank order.

        For rare use. It goes through the board, beside the collectives; where the run is not
        watched, it is a collective. ``event`` has a number, but `happens` does not look back at it.

        Raises `CollectiveMismatchError` when another rank does something else or has left,
        `RankFailedError` and `CollectiveTimeoutError` as a collective does.
        """
        monitor, ranks = PROCESS.monitor, self.communicator.ranks
        if monitor is None or self.communicator.is_alone:
            return self.communicator.gather_values(said, label=event.text)
        place = _Place(self, self._take_turn(event))

        def compare(answers: Answers) -> bool:
            self._have_come(monitor, place, answers)
            return False  # who has come may still be about to say its words

        line = json.dumps([self.communicator.rank, said])
        words = meet(monitor, place.key, place, compare, self.communicator.timeout, line=line)
        rows = dict(json.loads(line) for line in words.lines())
        if self._said is not None and self.communicator.rank == 0:
            self._said.forget()  # who is here has read all that was said before
        self._said = words
        return [rows[rank] for rank in range(len(ranks))]

    def describe(self) -> Mapping[str, Any]:
        """Describe this rank's position for peers; called from the monitor's thread."""
        rows = []
        for turn in self._turns:
            has_ended = turn.has_ended  # read before the steps: it is set after the last of them
            event, steps = turn.event, [*turn.steps]
            rows.append([turn.number, event.text, event.state, turn.issued, steps, has_ended])
        return {"turns": rows, "state": self._state(), "issued": self._issued()}

    # --------------------------------------------------------------------------- private

    def _take_turn(self, event: GroupEvent) -> Turn:
        number = self._turns[-1].number + 1 if self._turns else 1
        turn = Turn(number, event, self._issued())
        self._turns = (*self._turns[1 - REMEMBERED :], turn)
        return turn

    def _issued(self) -> list[int]:
        """Count the collectives that this rank has issued on each axis, control data included."""
        found = []
        for axis in self._axes:
            count = 0
            for channel in axis.channels:
                count += channel.counts.get("", 0)
            found.append(count)
        return found

    def _ask(
        self, monitor: FailureMonitor, turn: Turn, position: int | None = None, *, after: str = ""
    ) -> str:
        """Vote for an event, or for the step of it at ``position``; returns the key of the vote."""
        place = _Place(self, turn, position, after)
        key = f"{place.key}/{turn.event.text}/{turn.event.state}"
        if position is not None:
            key = f"{place.key}/{turn.at(position)}"
        elif after:
            key += f"/{turn.issued}"
        have_come = functools.partial(self._have_come, monitor, place)
        return meet(monitor, key, place, have_come, self.communicator.timeout).key

    def _have_come(self, monitor: FailureMonitor, place: _Place, answers: Answers) -> bool:
        """Check whether no rank is left to wait for. Raises when a rank does something else."""
        turn, position, is_complete = place.turn, place.position, True
        steps: dict[int, int] = {}
        for rank in place.ranks:
            told = self.told(answers.get(rank))
            if told is None:
                is_complete = False
                continue
            theirs = told.turns.get(turn.number)
            if place.after:
                issued = told.issued if theirs is None else theirs.issued
                self._compare_issued(monitor, place, issued, rank)
            if theirs is not None and theirs.event != turn.event:
                self._fail(monitor, turn, rank, theirs.event.text, told.state)
            if not told.has_come(turn.number, position):
                is_complete = False
                if instead := self._instead(told.turns):
                    self._fail(monitor, turn, rank, instead, told.state)
            elif theirs is not None and position is not None:
                steps[rank] = theirs.at(position) or 0
        if position is not None:
            self._compare_steps(monitor, turn, position, steps)
        return is_complete

    def _instead(self, turns: Mapping[int, Turn]) -> str:
        """Name the step that a rank of these ``turns`` runs instead of this rank's event."""
        return ""

    def _compare_steps(
        self, monitor: FailureMonitor, turn: Turn, position: int, steps: Mapping[int, int]
    ) -> None:
        """Raise if the ``steps`` of other ranks at ``position`` differ from this rank's."""

    def shown(self, turn: Turn, position: int | None) -> str:
        """Name an event, or its step at ``position``, for reports."""
        return f"{turn.event.shown or turn.event.text} of {self.root}"

    def told(self, answer: Mapping[str, Any] | None) -> _Told | None:
        """Return the same root's entry in another rank's ``answer``; None if there is none."""
        match None if answer is None else answer["described"].get(str(self.key)):
            case {"turns": list(rows), "state": dict(state), "issued": list(issued)} if all(
                isinstance(row, list) and len(row) == 6 for row in rows
            ):
                turns = {
                    number: Turn(number, GroupEvent(text, digest), *more)
                    for number, text, digest, *more in rows
                }
                return _Told(turns, state, issued)
        return None

    def _compare_issued(
        self, monitor: FailureMonitor, place: _Place, theirs: Sequence[int], rank: int
    ) -> None:
        """Raise if ``rank`` has issued a collective that this rank left out when it raised."""
        for axis, here, there in zip(self._axes, place.turn.issued, theirs, strict=True):
            if there > here:
                error = CollectiveMismatchError(
                    f"rank {self._rank} raised in {place.after} of {self.root}, after {here} "
                    f"collectives on axis {axis.axis}, and goes on, while rank {rank} has issued "
                    f"{there}: they would be mixed up with those of another pass. Let all ranks "
                    "give up a pass together, before its first collective, or end the run"
                )
                monitor.publish(error, is_cause=True)
                raise error

    def _fail(
        self, monitor: FailureMonitor, turn: Turn, rank: int, other: str, state: State
    ) -> NoReturn:
        text = turn.event.text
        if other != text:
            found = f"{text} on rank {self._rank}, {other} on rank {rank}"
        else:
            both = first_difference([self._rank, rank], [self._state(), state])
            found = f"{text} with {both or 'settings that differed for a while'}"
        error = CollectiveMismatchError(
            f"What the ranks do with {self.root} differs, at number {turn.number}: {found}. "
            f"Nothing of it has been sent. {REMEDY}"
        )
        monitor.publish(error, is_cause=True)
        raise error


class Registration:
    """The name of a describer in roll calls, equal on all ranks of a communicator.

    It is "" until the run is watched, which may be after the describer was made.
    """

    def __init__(self, kind: str, communicator: Communicator, describer: Describer) -> None:
        self._name = f"{kind}/{communicator.name}/{communicator.number(kind)}"
        self._rank = communicator.ranks[communicator.rank]
        self._is_asked = not communicator.is_alone
        self._describer = weakref.ref(describer)
        self._key = ""
        str(self)  # a rank that has come to nothing yet answers, too

    def __str__(self) -> str:
        monitor, describer = PROCESS.monitor, self._describer()
        if not self._key and self._is_asked and monitor is not None and describer is not None:
            # A store that served a run before has the keys of that.
            run = monitor.board.add(f"{self._name}/{self._rank}", 1)
            self._key = f"{self._name}/{run}"
            monitor.ranks.describers[self._key] = describer
        return self._key


class _Place(Awaited):
    """An event of ``check``, or a step of it, that the other ranks are to reach."""

    lacks = "has not come to it"

    def __init__(
        self, check: EventCheck, turn: Turn, position: int | None = None, after: str = ""
    ) -> None:
        """``after`` names the pass that raised on this rank before it, if one did."""
        axis = self._axis = check.communicator
        self.ranks = [rank for n, rank in enumerate(axis.ranks) if n != axis.rank]
        self.turn, self.position, self.after = turn, position, after
        self.key = f"{check.key}/{turn.number}" + ("" if position is None else f"/{position}")
        self._check = check
        rank = axis.ranks[axis.rank]
        self._shown = check.shown(turn, position)
        if after:
            self._shown += f", which rank {rank} begins after it raised in {after}"

    def describe(self) -> str:
        """Describe it in one phrase."""
        return f"the comparison of {self._shown},"

    def topic(self, answers: Answers) -> str:
        """Name it for reports."""
        return self.key

    def need(self) -> Need:
        """The ranks it needs: those of the axis that do not wait at this place."""
        ranks, channel = Need.listed(self.ranks), self._axis.name
        return Need(ranks=ranks, channel=channel, number=sys.maxsize, place=self.key)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        """Whether ``rank``, with this ``answer``, has reached the place."""
        told = self._check.told(answer)
        return told is not None and told.has_come(self.turn.number, self.position)

    def last_of(self, answer: Mapping[str, Any]) -> str:
        """What every rank must do, if another waits for something else."""
        return f". {REMEDY}" if answer["waiting"] else ""

    def differences(self, answers: Answers) -> list[str]:
        """The ranks that will never reach the place."""
        left = [r for r in self.ranks if r in answers and answers[r]["leaving"]]
        left = [rank for rank in left if not self.has_come(rank, answers[rank])]
        if not left:
            return []
        rank = self._axis.ranks[self._axis.rank]
        return [f"ranks {left} leave the run, where rank {rank} is at {self._shown}. {REMEDY}"]


def meet(
    monitor: FailureMonitor,
    key: str,
    place: Awaited,
    have_come: Callable[[Answers], bool],
    limit: float | None,
    *,
    line: str = "",
) -> Gathering:
    """Vote for ``key`` and wait for all ranks, at most ``limit`` seconds; the vote has a ``line``.

    Ranks that do not vote are asked; ``have_come`` decides from their answers whether the wait is
    over, or raises. So one rank that asks ends the wait of all, or fails it. This wait holds up
    nobody: everything that others need of this rank has been issued.
    """
    votes = Gathering(monitor.board, key, len(place.ranks) + 1)
    if votes.come(line):
        return votes
    first, every = FIRST_ROLL_CALL, NEXT_ROLL_CALL
    try:
        with BoundedWait(monitor, place, limit, first=first, every=every, place=key) as watch:
            while not votes.wait(watch.pause):
                answers = watch.look()
                if answers is not None and have_come(answers):
                    votes.close(ALL)
                    break
    except CommunicationError:
        with contextlib.suppress(RankFailedError):  # what it says cannot reach anybody
            votes.close("a failure")
        raise
    return votes
