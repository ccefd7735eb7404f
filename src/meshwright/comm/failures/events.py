"""Events of a root on this rank, one after another, compared with the other ranks.

Forward and backward passes bring collectives with them, so that a rank which does one more, one
less or one of another kind would pair them with those of something else. A rank knows by itself
when it does what it has not done before::

    the two events before, and this one       known: continue, nothing is sent
                                              new, or another mode: ask the other ranks first
    after a pass that raised                  ask, and continue only where every rank has issued as
                                              many collectives: what one left out, others wait in

Ranks ask through the board of `comm.failures.failure`, before any collective is issued: an answer
that differs is an error on the rank that asks, and the others read it while they wait.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

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
    """Something that all ranks do together."""

    text: str
    state: int = 0
    """A digest of the units' settings, where the event depends on them."""
    shown: str = field(default="", compare=False)
    """More words for reports of this rank."""


class EventCheck:
    """The events of one root on this rank. ``state`` says what is set, unit by unit.

    ``axes`` are all communicators through which the root sends, in the same order on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        root: str,
        state: Callable[[], State],
        axes: Sequence[Communicator] = (),
    ) -> None:
        self._communicator = communicator
        self._rank = communicator.ranks[communicator.rank]
        self._root = root
        self._state = state
        self._axes = tuple(axes)
        self._number = 0
        self._tail: tuple[tuple[int, str, int, list[int]], ...] = ()
        self._last: tuple[GroupEvent | None, GroupEvent | None] = (None, None)
        self._known: set[tuple[GroupEvent | None, ...]] = set()
        self._said: Gathering | None = None
        """The last words of all ranks."""
        self._key = Registration("events", communicator, self)

    def is_new(self, event: GroupEvent) -> bool:
        """Check whether ``event`` has never followed the two events before it."""
        return (*self._last, event) not in self._known

    def happens(
        self,
        event: GroupEvent,
        *,
        asks: bool = False,
        after: str = "",
        instead: Callable[[Mapping[str, Any]], str] = lambda _: "",
    ) -> None:
        """Note that ``event`` is next, and compare it where it is new; call before its collectives.

        ``after`` names the pass that raised on this rank just before, if one did or may have.
        ``instead`` finds in the answer of a rank what it does in the place of the event, where that
        is no event.

        Raises `CollectiveMismatchError` when another rank does something else, which is found out
        when it has never followed the two events before it, or when it ``asks``; and when
        another rank waits for what this one left out.
        """
        monitor = PROCESS.monitor
        if monitor is None or self._communicator.is_alone:
            return
        self._count(event)
        turn = (*self._last, event)
        self._last = (self._last[1], event)
        if asks or after or turn not in self._known:
            self._ask(monitor, event, after, instead)
            self._known.add(turn)

    def exchange(self, event: GroupEvent, said: str) -> list[str]:
        """Exchange the words of all ranks at ``event``, which is next, in rank order.

        For a few words now and then. It goes through the board, beside the collectives; a
        collective where no run is watched. ``event`` is no part of what follows on what.

        Raises `CollectiveMismatchError` when another rank does something else or has left,
        `RankFailedError` and `CollectiveTimeoutError` as a collective does.
        """
        monitor, ranks = PROCESS.monitor, self._communicator.ranks
        if monitor is None or self._communicator.is_alone:
            return self._communicator.gather_values(said, label=event.text)
        self._count(event)
        words = Gathering(monitor.board, f"{self._key}/{self._number}", len(ranks))
        if not words.come(json.dumps([self._communicator.rank, said])):

            def compare(answers: Answers) -> bool:
                self._have_come(monitor, event, "", answers)
                return False  # who has come may still be about to say its words

            _wait(monitor, self._coming(event), words, compare)
        rows = dict(json.loads(line) for line in words.lines())
        if self._said is not None and self._communicator.rank == 0:
            self._said.forget()  # who is here has read all that was said before
        self._said = words
        return [rows[rank] for rank in range(len(ranks))]

    def describe(self) -> Mapping[str, Any]:
        """Describe the place of this rank, for peers that ask; called from the monitor's thread."""
        return {"tail": self._tail, "state": self._state(), "issued": self._issued()}

    # --------------------------------------------------------------------------- private

    def _count(self, event: GroupEvent) -> None:
        self._number += 1
        here = (self._number, event.text, event.state, self._issued())
        self._tail = (*self._tail[1 - REMEMBERED :], here)

    def _issued(self) -> list[int]:
        """Count the collectives that this rank has issued on each axis, also of control data."""
        found = []
        for axis in self._axes:
            count = 0
            for channel in axis.channels:
                count += channel.counts.get("", 0)
            found.append(count)
        return found

    def _ask(
        self,
        monitor: FailureMonitor,
        event: GroupEvent,
        after: str,
        instead: Callable[[Mapping[str, Any]], str],
    ) -> None:
        votes = f"{self._key}/{self._number}/{event.text}/{event.state}"
        if after:
            votes += f"/{self._tail[-1][-1]}"
        here = functools.partial(self._have_come, monitor, event, after)

        def have_come(answers: Answers) -> bool:
            if here(answers):
                return True
            for rank in self._coming(event).ranks:
                answer = answers.get(rank)
                theirs = self._told(answer)
                is_behind = theirs is not None and not _has_come(theirs, self._number)
                other = instead(answer) if answer is not None and is_behind else ""
                if theirs is not None and other:
                    self._fail(monitor, event, rank, other, theirs["state"])
            return False

        wait_for_all(monitor, votes, self._coming(event, after), have_come)

    def _have_come(
        self, monitor: FailureMonitor, event: GroupEvent, after: str, answers: Answers
    ) -> bool:
        """Check whether nobody is left to wait for. Raises when a rank does something else."""
        number, is_complete = self._number, True
        for rank in self._communicator.ranks:
            if rank == self._rank:
                continue
            theirs = self._told(answers.get(rank))
            if theirs is None:
                is_complete = False
                continue
            tail = {at: (text, state) for at, text, state, _ in theirs["tail"]}
            if after:
                issued = next((n for at, *_, n in theirs["tail"] if at == number), theirs["issued"])
                self._compare_issued(monitor, issued, rank, after)
            if not tail or max(tail) < number:
                is_complete = False
            elif tail.get(number, (event.text, event.state)) != (event.text, event.state):
                self._fail(monitor, event, rank, tail[number][0], theirs["state"])
        return is_complete

    def _coming(self, event: GroupEvent, after: str = "") -> Coming:
        number, place = self._number, f"{event.shown or event.text} of {self._root}"
        if after:
            place += f", which rank {self._rank} begins after it raised in {after}"

        def has_come(answer: Mapping[str, Any]) -> bool:
            theirs = self._told(answer)
            return theirs is not None and _has_come(theirs, number)

        return Coming(
            communicator=self._communicator,
            place=place,
            name=f"{self._key}/{number}",
            come=has_come,
        )

    def _told(self, answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Find the same root's words in the ``answer`` of another rank; None without any."""
        theirs = None if answer is None else answer["described"].get(str(self._key))
        match theirs:
            case {"tail": list(tail), "state": dict(), "issued": list()} if all(
                isinstance(each, list) and len(each) == 4 for each in tail
            ):
                return theirs
        return None

    def _compare_issued(
        self, monitor: FailureMonitor, theirs: Sequence[int], rank: int, after: str
    ) -> None:
        """Raise where ``rank`` has issued what this rank left out when it raised."""
        mine = self._tail[-1][-1]
        for axis, here, there in zip(self._axes, mine, theirs, strict=True):
            if there > here:
                error = CollectiveMismatchError(
                    f"rank {self._rank} raised in {after} of {self._root}, after {here} "
                    f"collectives on axis {axis.axis}, and goes on, while rank {rank} has issued "
                    f"{there}: they would be mixed up with those of another pass. Let all ranks "
                    "give up a pass together, before its first collective, or end the run"
                )
                monitor.publish(error, is_cause=True)
                raise error

    def _fail(
        self, monitor: FailureMonitor, event: GroupEvent, rank: int, other: str, state: State
    ) -> NoReturn:
        if other != event.text:
            found = f"{event.text} on rank {self._rank}, {other} on rank {rank}"
        else:
            both = first_difference([self._rank, rank], [self._state(), state])
            found = f"{event.text} with {both or 'settings that differed for a while'}"
        error = CollectiveMismatchError(
            f"What the ranks do with {self._root} differs, at number {self._number}: {found}. "
            f"Nothing of it has been sent. {REMEDY}"
        )
        monitor.publish(error, is_cause=True)
        raise error


def _has_come(theirs: Mapping[str, Any], number: int) -> bool:
    return any(at >= number for at, *_ in theirs["tail"])


class Registration:
    """The name by which a describer answers roll calls, the same on all ranks of a communicator.

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


class Axis(Protocol):
    """The part of a `Communicator` that a wait looks at."""

    name: str
    rank: int
    ranks: tuple[int, ...]
    size: int
    timeout: float | None


class Coming(Awaited):
    """The other ranks' coming to a ``place`` of the program, as a `BoundedWait` sees it.

    ``name`` tells it from every other place, the same on all ranks; ``come`` tells from the answer
    of a rank whether it has come.
    """

    lacks = "has not come to it"

    def __init__(
        self,
        *,
        communicator: Axis,
        place: str,
        name: str,
        come: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self.communicator = communicator
        self.ranks = [r for n, r in enumerate(communicator.ranks) if n != communicator.rank]
        self._place = place
        self._name = name
        self._come = come

    def describe(self) -> str:
        """Name it in one phrase."""
        return f"the comparison of {self._place},"

    def topic(self, answers: Answers) -> str:
        """Name it for reports."""
        return self._name

    def need(self) -> Need:
        """Say whom it needs: the ranks of the axis that do not wait at this place."""
        ranks, channel = Need.listed(self.ranks), self.communicator.name
        return Need(ranks=ranks, channel=channel, number=sys.maxsize, place=self._name)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        """Tell whether ``rank``, which says ``answer``, has come."""
        return self._come(answer)

    def last_of(self, answer: Mapping[str, Any]) -> str:
        """Say what every rank must do, where another waits for something else."""
        return f". {REMEDY}" if answer["waiting"] else ""

    def differences(self, answers: Answers) -> list[str]:
        """Say which ranks will never come."""
        left = [r for r in self.ranks if r in answers and answers[r]["leaving"]]
        left = [rank for rank in left if not self._come(answers[rank])]
        if not left:
            return []
        mine = self.communicator.ranks[self.communicator.rank]
        return [f"ranks {left} leave the run, where rank {mine} is at {self._place}. {REMEDY}"]


def wait_for_all(
    monitor: FailureMonitor,
    votes: str,
    awaited: Coming,
    have_come: Callable[[Answers], bool],
) -> None:
    """Vote for ``votes`` and wait until every rank has.

    Ranks that do not vote are asked; ``have_come`` tells from their answers whether nobody is to
    come any more, or raises. This wait keeps nobody from coming: what others need of this rank has
    been issued.
    """
    coming = Gathering(monitor.board, votes, awaited.communicator.size)
    if not coming.come():
        _wait(monitor, awaited, coming, have_come)


def _wait(
    monitor: FailureMonitor,
    awaited: Coming,
    coming: Gathering,
    have_come: Callable[[Answers], bool],
) -> None:
    """Wait at the store for all votes; a rank that asks ends the wait of all, or fails it."""
    first, every, place = FIRST_ROLL_CALL, NEXT_ROLL_CALL, coming.key
    limit = awaited.communicator.timeout
    try:
        with BoundedWait(monitor, awaited, limit, first=first, every=every, place=place) as watch:
            while not coming.wait(watch.pause):
                answers = watch.look()
                if answers is not None and have_come(answers):
                    coming.close(ALL)
                    return
    except CommunicationError:
        with contextlib.suppress(RankFailedError):  # what it says cannot reach anybody
            coming.close("a failure")
        raise
