"""Waits for other ranks: how long they last, what they report meanwhile, and what ends them.

Every wait of Meshwright is a `BoundedWait`, and ends by the same rules::

    the board names a failure                    raise it
    a missing rank's process has ended           it failed first
    a missing rank leaves the run, or does       a mismatch
      something that can never fit
    a missing rank does not answer               inspect its process: it is lost if stopped or
                                                 without CPU time for STILL seconds, waited for if
                                                 busy; lost after UNSEEN s if no rank can inspect it
    it waits for a rank that waits, directly or  a mismatch: none of them ever comes; seen at two
      through others, for it                     roll calls, CONFIRM_AFTER seconds apart
    every rank answers, and waits itself         nothing moves for DEADLOCK seconds: give up
    the user's limit has passed                  give up

A rank that answers and is busy is always waited for. After ``hang_after`` seconds every rank logs
the missing ranks, then one rank every `LINE_EVERY` seconds; nothing is logged while all missing
ranks work alone, in a phase with an infinite limit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from meshwright.comm.failures.failure import Failure, FailureMonitor
from meshwright.comm.failures.liveness import CONTROL, NOBODY, PATIENCE, Answers, Need
from meshwright.comm.failures.processes import Look, Stillness
from meshwright.comm.failures.status import one_line
from meshwright.comm.failures.store import EVERY
from meshwright.comm.groups.registry import PROCESS
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator

MISMATCH_AFTER = 3.0
"""Seconds after which a wait looks whether the other ranks do something else or have left."""

CALL_EVERY = 10.0
"""Seconds between the roll calls of a long wait."""

LINE_EVERY = 30.0
"""Seconds between two lines that say who is waited for."""

STILL = 60.0
"""Seconds for which the process of a rank that does not answer may do nothing."""

CONFIRM_AFTER = 2.0
"""Seconds from a roll call that finds ranks waiting crosswise to the one that confirms it."""

DEADLOCK = 60.0
"""Seconds for which all ranks may wait, where it is not known whom each of them needs."""

UNSEEN = 600.0
"""Seconds for which a rank that nobody can inspect may be silent, or data may be on its way."""

GRACE = 1.0
"""Seconds in which a rank that closed its connections may still say why."""

REMEMBERED = 16
"""The number of last operations that a rank can name in a hang report."""

_TRANSFERS = ("send", "recv")

_AWAKE = 5.0
"""Seconds between two looks count up to this: a process that is stopped does not wait."""

_OF_A_TRANSPORT = re.compile(r"gloo/|\[gloo\]|RankFailedError: ", re.IGNORECASE)
"""The words of a transport that has lost a peer: Gloo's, and ours as C++ callbacks repeat them."""


class Awaited(Protocol):
    """Something that this rank waits for and other ranks take part in."""

    lacks: str
    """Words for a rank that has not done its part: `rank 1 has not issued it`."""
    ranks: Sequence[int]
    """The world's numbers of the other ranks that have a part in it."""

    def describe(self) -> str:
        """Describe it in one phrase."""

    def topic(self, answers: Answers) -> str:
        """The name for reports, the same on every rank that waits for it."""

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        """Whether ``rank``, with this ``answer``, has done its part."""

    def need(self) -> Need:
        """The ranks it needs, for ranks that are asked; called from the monitor's thread."""
        return NOBODY

    def differences(self, answers: Answers) -> list[str]:
        """What other ranks do instead, if the two can never match."""
        return []

    def last_of(self, answer: Mapping[str, Any]) -> str:
        """A rank's last operation on the same axis, for reports."""
        return ""


@dataclass(frozen=True, slots=True)
class Issued:
    """The record of an issued operation."""

    sequence: int
    kind: str
    label: str
    peer: int | None = None

    def __str__(self) -> str:
        label = f' "{self.label}"' if self.label else ""
        return f"{self.kind} #{self.sequence}{label}"

    def describe(self, axis: str) -> str:
        """Describe it in one phrase: kind, number, label, ``axis``."""
        peer = ""
        if self.peer is not None:
            side = {"send": "to", "recv": "from"}.get(self.kind, "of")
            peer = f" {side} rank {self.peer}"
        return f"{self}{peer} on axis {axis}"


class AwaitedOperation(Awaited):
    """An issued operation, as a `BoundedWait` sees it."""

    lacks = "has not issued it"

    def __init__(self, communicator: Communicator, issued: Issued, line: str = "") -> None:
        """``line`` is the user's line that issued it, if another line waits."""
        self._communicator, self._issued, self._line = communicator, issued, line
        self._rank = communicator.ranks[communicator.rank]
        if issued.kind in _TRANSFERS and issued.peer is not None:
            self.ranks: Sequence[int] = [communicator.ranks[issued.peer]]
        else:
            self.ranks = [rank for rank in communicator.ranks if rank != self._rank]

    def topic(self, answers: Answers) -> str:
        return f"{self._communicator.name}/{self._key(self._rank)}/{self._issued.sequence}"

    def describe(self) -> str:
        called = f", called at {self._line}," if self._line else ""
        return f"{self._issued.describe(self._communicator.axis)}{called}"

    def need(self) -> Need:
        """The ranks it needs: the peer of a transfer, or the other ranks of the axis."""
        ranks, channel = Need.listed(self.ranks), self._communicator.name
        key = self._key(self.ranks[0]) if self.ranks else ""
        return Need(ranks=ranks, channel=channel, key=key, number=self._issued.sequence)

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        counts = self._group(answer).get("counts", {})
        return int(counts.get(self._key(rank), 0)) > self._issued.sequence

    def differences(self, answers: Answers) -> list[str]:
        """List what other ranks have issued at this number, if it is another operation."""
        issued = self._issued
        found: list[str] = []
        if issued.kind in _TRANSFERS:
            return []
        for rank in self.ranks:
            for entry in self._group(answers.get(rank, {})).get("last", ()):
                at_this_number = entry["sequence"] == issued.sequence
                if entry["kind"] in _TRANSFERS or not at_this_number:
                    continue
                if (entry["kind"], entry["label"]) != (issued.kind, issued.label):
                    label = f' "{entry["label"]}"' if entry["label"] else ""
                    found.append(f"rank {rank} issued {entry['kind']} #{issued.sequence}{label}")
        return found

    def last_of(self, answer: Mapping[str, Any]) -> str:
        last = self._group(answer).get("last", ())
        if not last:
            return ", nothing issued on this axis yet"
        label = f' "{last[-1]["label"]}"' if last[-1]["label"] else ""
        return f", last issued {last[-1]['kind']} #{last[-1]['sequence']}{label}"

    def _group(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = answer.get("groups", {}).get(self._communicator.name, {})
        return found

    def _key(self, rank: int) -> str:
        """The counter under which ``rank`` numbers its side of the operation."""
        issued = self._issued
        if issued.kind not in _TRANSFERS:
            return ""
        if rank == self._rank:
            return f"{issued.kind}:{issued.peer}"
        other = "recv" if issued.kind == "send" else "send"
        return f"{other}:{self._communicator.rank}"


class BoundedWait:
    """One bounded wait of this rank. Use it in a ``with``, and call `look` now and then."""

    def __init__(
        self,
        monitor: FailureMonitor,
        awaited: Awaited,
        limit: float | None,
        *,
        first: float = MISMATCH_AFTER,
        every: float = float("inf"),
        since: float | None = None,
        place: str = "",
    ) -> None:
        """``limit`` is the user's, in seconds. Ranks are asked after ``first`` seconds, then every
        ``every`` seconds, and from ``hang_after`` on every `CALL_EVERY`.

        ``since`` is the start of the wait on the monotonic clock; now when None. ``place`` is the
        same for all ranks that wait for the same thing: a few of them ask for all.
        """
        self._monitor = monitor
        self._awaited = awaited
        self._limit = limit
        self._give_up = float("inf") if limit is None else limit
        self._place = place or awaited.topic({})
        # A rank sees a question when it next looks at the board: among thousands that takes longer.
        pause = monitor.board.every
        self._every = every * max(1.0, pause / EVERY)
        self._looked = monitor.clock.now()
        self._begun = self._looked if since is None else since
        self._waited = self._looked - self._begun
        """Seconds of this wait in which the process was awake."""
        self._ask_at = min(monitor.hang_after, max(first, 2 * (pause - EVERY)))
        self._report_at = monitor.hang_after
        self._reports = 0
        self._is_complete = False
        """True where all ranks had done their part when they were last to be reported."""
        self._has_excused = False
        """True where the limit was last put off for a rank that may take its time."""
        self._silent: dict[int, _Silence] = {}
        self._alone: set[int] = set()
        """Ranks that worked alone when they answered last."""
        self._serials: Mapping[int, object] = {}
        self._serials_since = 0.0
        self._number = 0
        """The number of this wait."""
        self._is_crossed = False
        """True where ranks waited crosswise, this one among them, when they were last asked."""
        self._waits: Mapping[int, object] = {}
        """The number of the wait in which each rank was then."""

    def __enter__(self) -> Self:
        ranks = self._monitor.ranks
        self._number = ranks.begin_wait(self._awaited.describe(), self._awaited.need)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._monitor.ranks.end_wait()
        if error is not None:
            self._monitor.has_raised = True

    def look(self) -> Answers | None:
        """Raise when the wait must end. Returns the ranks' answers, if they were asked now."""
        self._check()
        now = self._monitor.clock.now()
        self._waited += min(now - self._looked, _AWAKE)
        self._looked = now
        if self._waited >= self._give_up:
            if not self._monitor.leads(f"{self._place}/limit"):
                self._give_up = self._waited + CALL_EVERY
                return None
            answers = self._ask()
            if not self._put_off(answers):
                self._end(answers, is_mismatch=self._differs(answers))
            return answers
        if self._waited < self._ask_at:
            return None
        is_asking = self._is_crossed or self._monitor.leads(self._place)
        answers = self._ask() if is_asking else None
        self._ask_at = self._waited + CALL_EVERY
        if self._waited < self._monitor.hang_after:
            until = min(self._waited + self._every, self._monitor.hang_after)
            self._ask_at = min(self._ask_at, until)
        if answers is None:
            return None
        is_crossed = self._cross(answers)
        if is_crossed or self._differs(answers):
            self._end(answers, is_mismatch=True)
        if self._is_deadlocked(answers) or self._lost(answers):
            self._end(answers)
        if self._is_crossed:
            self._ask_at = min(self._ask_at, self._waited + CONFIRM_AFTER)
        if self._waited >= self._report_at:
            self._report(answers)
        return answers

    @property
    def pause(self) -> float:
        """Seconds to sleep, one at most, until the next `look`."""
        return max(0.001, min(1.0, self._ask_at - self._waited, self._give_up - self._waited))

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise the reason for a transport's ``error``, naming the rank that caused it."""
        if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError):
            raise error  # by a transport of ours, which names the ranks itself
        monitor, what = self._monitor, self._awaited.describe()
        explain(monitor, error, f"rank {monitor.rank} was waiting for {what}", self._awaited.ranks)
        left = [rank for rank in self._awaited.ranks if rank in monitor.ranks.left]
        if left:
            raise CollectiveMismatchError(
                f"{what} cannot end: {_left(left[0])}; {one_line(error)}"
            ) from error
        raise CommunicationError(
            f"{what} failed although every rank of the axis answers: "
            + "; ".join([one_line(error), *monitor.said()])
        ) from error

    # ---------------------------------------------------------------- steps

    def _check(self) -> None:
        try:
            self._monitor.check()
        except RankFailedError as failed:
            here = f"rank {self._monitor.rank} was waiting for {self._awaited.describe()}"
            mismatch = self._monitor.mismatch
            if mismatch:
                raise CollectiveMismatchError(f"{mismatch}; {here}") from None
            raise RankFailedError(f"{failed}; {here}", failed.rank) from None

    def _ask(self) -> Answers:
        """Call the roll, and inspect the processes of ranks that do not answer."""
        unseen = [rank for rank, silence in self._silent.items() if silence.is_remote]
        try:
            answers = self._monitor.roll_call(PATIENCE, unseen)
            if len(answers) < self._monitor.world_size:
                self._monitor.ranks.read_left()
        except RankFailedError:
            self._check()
            raise
        for rank in self._awaited.ranks:
            if rank in answers:
                self._silent.pop(rank, None)
                is_alone = answers[rank]["alone"] and not answers[rank]["waiting"]
                (self._alone.add if is_alone else self._alone.discard)(rank)
            else:
                silence = self._silent.setdefault(rank, _Silence(self._waited))
                silence.take(*_look(self._monitor, rank, answers), self._waited)
        return answers

    def _put_off(self, answers: Answers) -> bool:
        """Extend the user's limit where a missing rank compiles or has a longer limit itself."""
        missing = self._missing(answers)
        has_reason = any(answers[r]["compiling"] or answers[r]["excused"] for r in missing)
        # Who was waited for may have come just now: its operation gets the limit of any other.
        has_reason, self._has_excused = (
            has_reason or (self._has_excused and not missing),
            has_reason,
        )
        silent = self._unanswering(answers)
        if not has_reason or silent or self._differs(answers):
            return False
        self._give_up = self._waited + (self._limit or 0.0)
        return True

    def _end(self, answers: Answers, *, is_mismatch: bool = False) -> NoReturn:
        """Give up, naming the culprits on the board."""
        monitor = self._monitor
        text = self._describe(answers)
        silent = self._unanswering(answers)
        lost = self._lost(answers)
        is_mismatch = is_mismatch and not lost
        culprit = next(iter([*lost, *silent, *self._missing(answers)]), monitor.rank)
        state = answers.get(culprit, {})
        failure = Failure(
            rank=culprit,
            by=monitor.rank,
            phase=str(state.get("phase", "")),
            error=text,
            line=str(state.get("line", "")),
            is_mismatch=is_mismatch,
        )
        monitor.post_failure(failure)
        for rank in silent:
            monitor.fence(rank)
        if lost and self._silent[lost[0]].has_ended:
            self._check()  # who found it before may have ended it
            raise RankFailedError(str(failure), culprit)
        raise (CollectiveMismatchError if is_mismatch else CollectiveTimeoutError)(text)

    def _report(self, answers: Answers) -> None:
        """Log who is missing: the first time on every rank, then on one."""
        missing = self._missing(answers)
        if not missing and len(answers) == self._monitor.world_size and not self._is_complete:
            # The last has come just now.
            self._is_complete = True
            self._report_at = self._waited + self._monitor.hang_after
            return
        if self._works_alone([*missing, *self._unanswering(answers)]):
            return
        self._report_at = self._waited + LINE_EVERY
        self._reports += 1
        if self._reports > 1 and missing and all(answers[r]["waiting"] for r in missing):
            return  # those that they wait for are named by them
        text = self._describe(answers)
        topic = f"{self._awaited.topic(answers)}/{self._reports}"
        self._monitor.report(topic, text, everywhere=self._reports == 1)

    # ---------------------------------------------------------------- who is missing

    def _unanswering(self, answers: Answers) -> list[int]:
        return [rank for rank in self._awaited.ranks if rank not in answers]

    def _works_alone(self, ranks: Sequence[int]) -> bool:
        """Whether all missing ``ranks`` work alone."""
        silences = [self._silent[rank] for rank in ranks if rank in self._silent]
        at_work = all(silence.is_at_work for silence in silences)
        return bool(ranks) and self._alone.issuperset(ranks) and at_work

    def _lost(self, answers: Answers) -> list[int]:
        """List ranks whose processes have ended or hang, or that nobody has seen for too long."""
        silent = [r for r in self._silent if r not in answers and r not in self._monitor.ranks.left]
        return sorted(
            (rank for rank in silent if self._silent[rank].is_lost),
            key=lambda rank: not self._silent[rank].has_ended,
        )

    def _leaving(self, answers: Answers) -> list[int]:
        """List missing ranks that have left the run; none when this rank leaves, too."""
        if self._monitor.ranks.is_leaving:
            return []
        gone = [rank for rank in self._unanswering(answers) if rank in self._monitor.ranks.left]
        return gone + [rank for rank in self._missing(answers) if answers[rank]["leaving"]]

    def _missing(self, answers: Answers) -> list[int]:
        """List ranks that answer but have not done their part."""
        return [
            rank
            for rank in self._awaited.ranks
            if rank in answers and not self._awaited.has_come(rank, answers[rank])
        ]

    def _differs(self, answers: Answers) -> bool:
        return bool(self._awaited.differences(answers) or self._leaving(answers))

    def _cross(self, answers: Answers) -> bool:
        """Whether this rank and others have waited for each other since the last roll call.

        Then all have waited at one moment between the two calls, each for something that another
        has not issued since, so none ever will. A single call cannot show this, because its answers
        are of different times.
        """
        waits = {r: a["waiting"]["number"] for r, a in answers.items() if a["waiting"]}
        before, self._waits = self._waits, waits
        own, missing = self._monitor.rank, self._missing(answers)
        is_main = waits.get(own) == self._number  # else the main thread does something else
        self._is_crossed = is_main and own in crossed(answers, waits, own, missing)
        same = {rank for rank, number in waits.items() if before.get(rank) == number}
        return self._is_crossed and own in crossed(answers, same, own, missing)

    def _is_deadlocked(self, answers: Answers) -> bool:
        """Whether all ranks have been in the same waits for too long."""
        serials: Mapping[int, object] = {
            rank: answer["waiting"].get("number") for rank, answer in answers.items()
        }
        if len(answers) < self._monitor.world_size or None in serials.values():
            serials = dict[int, object]()
        if serials != self._serials:
            self._serials, self._serials_since = serials, self._waited
        bound = DEADLOCK if self._missing(answers) else UNSEEN
        return bool(serials) and self._waited - self._serials_since >= bound

    def _describe(self, answers: Answers) -> str:
        ranks, monitor = self._awaited.ranks, self._monitor
        parts = [self._describe_silent(rank) for rank in self._unanswering(answers)]
        parts += self._awaited.differences(answers)
        missing = self._missing(answers)
        for rank in missing:
            state = answers[rank]
            if state["leaving"]:
                parts.append(_leaves(rank))
                continue
            phase = f"in {state['phase']} " if state["phase"] else ""
            busy = "compiling " if state["compiling"] else ""
            waits = f", waits for {state['waiting'].get('what')}" if state["waiting"] else ""
            parts.append(
                f"rank {rank} {self._awaited.lacks}: it is {busy}{phase}at {state['line']}{waits}"
                f"{self._awaited.last_of(state)}"
            )
        parts += monitor.said()
        here = {monitor.rank, *(rank for rank in ranks if rank in answers)}
        waiting = ", ".join(str(r) for r in sorted(here - set(missing)))
        if not parts:
            parts = ["no rank is missing: the transport is stuck, or ranks wait in different calls"]
            waits = ((r, answers[r]["waiting"]) for r in sorted(here) if r in answers)
            parts += [f"rank {r} waits for {wait.get('what')}" for r, wait in waits if wait]
        reason = "; ".join(parts)
        return (
            f"{self._awaited.describe()} has not ended after "
            f"{monitor.clock.now() - self._begun:.0f} s: {reason}; waiting: rank {waiting}"
        )

    def _describe_silent(self, rank: int) -> str:
        if rank in self._monitor.ranks.left:
            return _left(rank)
        silence = self._silent.get(rank)
        why = "" if silence is None else silence.why()
        if silence is not None and silence.is_at_work:
            return f"rank {rank} does not answer: {why}"
        return f"rank {rank} does not answer (stopped, killed or cut off){why and ': '}{why}"


def crossed(answers: Answers, waiting: Iterable[int], own: int, missing: Iterable[int]) -> set[int]:
    """Return the ranks among ``waiting`` that wait for each other, directly or through others.

    Each of them waits for at least one of them that has not done its part: so none can end its wait
    before another one has. Rank ``own`` waits for ``missing``. A rank is still waited for if a
    thread other than its main one may do its part.
    """
    found = {rank for rank in waiting if not answers[rank]["threads"]}
    needed = {rank: _needed(answers, rank) for rank in found if rank != own} | {own: set(missing)}
    while True:
        stuck = {rank for rank in found if needed[rank] & found}
        if stuck == found:
            return found
        found = stuck


def _needed(answers: Answers, rank: int) -> set[int]:
    """List the ranks that have not done their part in the wait of ``rank``."""
    need = answers[rank]["waiting"]["need"]
    channel, ranks = need["channel"], need["ranks"]
    if ranks is None:
        name = channel.removesuffix(CONTROL)
        ranks = [other for other, answer in answers.items() if name in answer["groups"]]

    def lacks(answer: Mapping[str, Any]) -> bool:
        if need["place"] and answer["waiting"].get("need", {}).get("place") == need["place"]:
            return False
        counts = answer["groups"].get(channel, {}).get("counts", {})
        return int(counts.get(need["key"], 0)) <= need["number"]

    others = [other for other in ranks if other in answers and other != rank]
    return {other for other in others if lacks(answers[other])}


class _Silence:
    """A rank that does not answer, and its process. Times are seconds of the wait."""

    def __init__(self, since: float) -> None:
        self.is_remote = True
        """True when only others can look at its process, if anybody can."""
        self._since = self._now = since
        self._look: Look | None = None
        self._stillness = Stillness()
        self._still = 0.0

    def take(self, look: Look | None, is_remote: bool, now: float) -> None:
        """Add a snapshot taken at ``now``, which ``is_remote`` if only other ranks can take it."""
        self.is_remote, self._now = is_remote, now
        if look is not None:
            self._look = look
            self._still = self._stillness.take(look, now)

    @property
    def has_ended(self) -> bool:
        return self._look is not None and self._look.state == ""

    @property
    def is_at_work(self) -> bool:
        return self._look is not None and not self._look.is_stopped and not self._still

    @property
    def is_lost(self) -> bool:
        if self._look is None:
            return self._now - self._since >= UNSEEN
        return self.has_ended or self._still >= STILL

    def why(self) -> str:
        """What is known of the process."""
        look = self._look
        if look is None:
            return f"silent for {self._now - self._since:.0f} s, and no rank can see its process"
        if self.has_ended:
            return "its process has ended"
        if look.is_stopped:
            return "its process is stopped by a signal"
        if self._still:
            return f"its process has used no CPU time for {self._still:.0f} s"
        return "its process is at work, in a call that lets no other thread of it run"


def _look(monitor: FailureMonitor, rank: int, answers: Answers) -> tuple[Look | None, bool]:
    """Inspect ``rank``'s process, or use a peer's snapshot; also True if this rank cannot look."""
    own = monitor.ranks.look_at(rank)
    told = (Look.of(answer["seen"].get(str(rank))) for answer in answers.values())
    return next((look for look in (own, *told) if look is not None), None), own is None


def explain(
    monitor: FailureMonitor, error: BaseException, what: str, ranks: Sequence[int] | None = None
) -> None:
    """Raise `RankFailedError` for the rank that caused a transport's ``error``, if there is one.

    ``what`` says what this rank did, ``ranks`` lists possible causes; None: any.
    """
    until = monitor.clock.now() + GRACE
    while monitor.clock.now() < until:
        try:
            monitor.look()
        except RankFailedError as failed:
            raise RankFailedError(f"{failed}; {what}", failed.rank) from error
        monitor.clock.sleep(monitor.board.every / 5)
    if isinstance(error, RankFailedError):
        if monitor.ranks.has_ended(error.rank):
            monitor.post_failure(Failure(rank=error.rank, by=monitor.rank, error=str(error)))
        raise error  # nobody has said more within the grace
    monitor.ranks.read_left()
    lost = _find_lost(monitor, monitor.others if ranks is None else ranks)
    if lost is not None:
        text = "it does not answer (killed, or cut off from the network)"
        text = "; ".join([f"{text} while {what}", *monitor.said()])
        monitor.post_failure(Failure(rank=lost, by=monitor.rank, error=text))
        raise RankFailedError(f"rank {lost} failed first: {text}", lost) from error


def blame(monitor: FailureMonitor, error: BaseException) -> str:
    """Name the rank whose failure caused ``error`` outside our waits; "" without one.

    A rank that was lost silently is put on the board.
    """
    try:
        if any(map(is_of_a_transport, chain_of(error))) or isinstance(error, RankFailedError):
            explain(monitor, error, f"rank {monitor.rank} noticed it outside of its own waits")
            left = monitor.ranks.left
            if left:
                error.add_note(_left(min(left)))
        monitor.look()
    except RankFailedError as failed:
        failure = monitor.failure
        is_said = str(failed) in str(error) or (failure is not None and failure.error in str(error))
        return "" if is_said else str(failed)
    return ""


def is_of_a_transport(error: BaseException) -> bool:
    """Check whether ``error`` is a transport's error for a lost peer, by its text."""
    return type(error) is RuntimeError and _OF_A_TRANSPORT.search(str(error)) is not None


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over ``error`` and its causes."""
    for _ in range(20):  # a chain that was set manually may be a circle
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _find_lost(monitor: FailureMonitor, ranks: Iterable[int]) -> int | None:
    """Return the first of ``ranks`` that is lost, now that a connection has been closed.

    A silent rank on this machine is alive as long as its process exists; a rank that nobody can
    inspect is asked twice.
    """
    ended = [rank for rank in ranks if monitor.ranks.has_ended(rank)]
    silent: list[int] = []
    for about in ((), ranks):
        if ended or (about and not silent):
            break
        answers = monitor.roll_call(PATIENCE / 2, about)
        seen = {r: _look(monitor, r, answers)[0] for r in ranks if r not in answers}
        ended = [rank for rank, look in seen.items() if look is not None and look.state == ""]
        silent = [rank for rank, look in seen.items() if look is None]
    lost = [rank for rank in [*ended, *silent] if rank not in monitor.ranks.left]
    return lost[0] if lost else None


_ADVICE = "run as many iterations (batches) on every rank, or join() where one has fewer"


def _leaves(rank: int) -> str:
    return f"rank {rank} is done and leaves the run without it: {_ADVICE}"


def _left(rank: int) -> str:
    return f"rank {rank} was done and has left the run: {_ADVICE}"


# ---------------------------------------------------------------- outside of our own operations


class AllOthers(Awaited):
    """An operation of the whole run, named ``what``, that needs all other ranks."""

    def __init__(self, monitor: FailureMonitor, what: str) -> None:
        self.ranks = monitor.others
        self._what = what

    def describe(self) -> str:
        return self._what


class OutsideCall(AllOthers):
    """A call of `torch.distributed`, or the joining of a group.

    Nothing is known of the group or the operation, only that this rank waits. It may need all ranks
    of the run; a rank that waits too, in any call, has done its part.
    """

    lacks = "is busy"

    def __init__(
        self, monitor: FailureMonitor, what: str, missing: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """``missing`` returns the ranks that the call waits for, as far as known."""
        super().__init__(monitor, what)
        self._missing = missing

    def need(self) -> Need:
        return NOBODY if self._missing is None else Need(ranks=list(self._missing()))

    def topic(self, answers: Answers) -> str:
        """The name, by the first rank that waits, which is the same for all that do."""
        waiting = {r: answer["waiting"] for r, answer in answers.items() if answer["waiting"]}
        first = min(waiting, default=-1)
        return f"outside/{first}/{waiting.get(first, {}).get('number')}"

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        return bool(answer["waiting"])


@contextlib.contextmanager
def watched(
    what: str, missing: Callable[[], Sequence[int]] | None = None
) -> Iterator[Callable[[], object]]:
    """Watch a wait in the block, which must call the given function now and then; it may raise.

    ``missing`` lists the ranks of the world that it waits for, where that is known. Does nothing if
    the run is not watched.
    """
    monitor = PROCESS.monitor
    if monitor is None:
        yield lambda: None
        return
    with BoundedWait(monitor, OutsideCall(monitor, what, missing), monitor.limit) as watch:
        yield watch.look
