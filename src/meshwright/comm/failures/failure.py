"""The first failure: a board in the store, where ranks post notices and answer roll calls.

Ranks post notices in numbered slots of the store. A slot is taken by compare-and-set, so all ranks
see one order. The board's thread on each rank reads new slots a few times a second and answers roll
calls, also while the main thread computes or waits.

==========  =====================================================================
notice      meaning
==========  =====================================================================
failed      a rank raised, or was found lost; the first one in force applies to
            every rank that has not resumed since it raised that failure
recovered   the failed rank resumes, after its caller handled the error; if ranks
            had differed, each of the others still raises once
ended       the error of a rank has ended its process: it does not resume
call        a roll call: every rank answers with its status, under the slot's number
report      a hang report that every rank logs, once for each operation
deviation   a rank is about to act differently; "" withdraws it
==========  =====================================================================

Other programs may write to the store: anything else is ignored, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.comm.failures.liveness import PATIENCE, Answers, Liveness
from meshwright.comm.failures.processes import Process
from meshwright.comm.failures.status import (
    last_operation,
    object_of,
    one_line,
    phase_text,
    source_line,
)
from meshwright.comm.failures.store import EVERY, STORE, Store, StoreClient, SystemClock, hosts
from meshwright.errors import CommunicationError, RankFailedError

_log = logging.getLogger("meshwright")

SHARED_FOR = 0.5
"""Seconds for which the roll call of one rank serves others, too."""

LEADERS = 8
"""Ranks that ask for all that wait at one place: several, because any may be lost."""

TURN = 30.0
"""Seconds after which other ranks may lead."""

REMEMBERED = 64
"""Places whose leaders a rank remembers."""

_OF_A_FAILURE: Mapping[str, type] = {
    "rank": int,
    "by": int,
    "phase": str,
    "operation": str,
    "error": str,
    "line": str,
    "attempt": int,
    "is_mismatch": bool,
}
_NOTICES: Mapping[str, Mapping[str, type]] = {
    "failed": {**_OF_A_FAILURE, "is_final": bool, "is_difference": bool, "past": list},
    "recovered": {"rank": int},
    "ended": {"rank": int},
    "call": {"about": list},
    "report": {"text": str},
    "deviation": {"rank": int, "text": str},
}
"""The fields of each kind of notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first failure of a run, as posted on the board."""

    rank: int
    """The world's number of the rank that failed or was lost; `STORE` for the run's store."""
    by: int
    """The rank that says so: itself, or the one that found it lost."""
    phase: str = ""
    operation: str = ""
    error: str
    line: str = ""
    attempt: int = 0
    """The number of times that the rank that says so had resumed after it raised."""
    is_mismatch: bool = False
    """True where ranks wait for different things: every rank raises that."""

    @property
    def what(self) -> tuple[str, str]:
        """The phase in which the rank failed, and the type of the exception."""
        return self.phase, self.error.partition(":")[0]

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        last = f", after {self.operation}" if self.operation else ""
        line = f" ({self.line})" if self.line else ""
        found = "" if self.by == self.rank else f" [found by rank {self.by}]"
        return f"rank {self.rank} failed first{where}{last}: {self.error}{line}{found}"


class FailureMonitor:
    """Posts this rank's failure, reads the others', and answers roll calls. One per process."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        hang_after: float,
        limit: float | None = None,
        host: int = STORE,
        interval: float = EVERY,
        clock: SystemClock | None = None,
        process: Process | None = None,
    ) -> None:
        """``host`` is the rank in whose process the store lives; `STORE` for none or unknown.

        ``process`` is this rank's process; the current one when None.
        """
        self.rank = rank
        self.world_size = world_size
        self.hang_after = hang_after
        """Seconds after which a wait is reported as a hang."""
        self.limit = limit
        """Seconds after which a wait ends whatever the others do; None without such a limit."""
        self.clock = clock or SystemClock()
        """The time that all waits go by."""
        every = max(interval, world_size / 2000)
        self.board = StoreClient(store, host=host, every=every, clock=self.clock)
        """The store on which the notices stand."""
        self.ranks = Liveness(self.board, rank, world_size, process or Process.own())
        """The ranks, and their processes."""
        self.pid = os.getpid()
        self.has_raised = False
        """True when an error that names another rank, or ends the process, has been raised here."""
        self.deviations: dict[int, str] = {}
        """What ranks have announced that they do differently; hang reports show it."""
        self._is_hosting = hosts(store)
        self._seen = 0
        self._called = (0, float("-inf"), frozenset[int]())
        """Slot and time of the last roll call of any rank, and the ranks that it is about."""
        self._turns: dict[str, tuple[int, bool]] = {}
        """By place, the last turn in which this rank has asked to lead, and whether it does."""
        self._has_warned = False
        self._posted = False
        self._attempt = 0
        self._gave_up: tuple[str, str] | None = None
        """The phase in which this rank first raised since it resumed, and the error's type."""
        self._left: tuple[str, str] | None = None
        """Those of the attempt before."""
        self._standing: dict[int, Failure] = {}
        """Failures that were not taken back, by slot; the same on every rank. Slot 0 is not on the
        board: it was found when that could not be reached any more."""
        self._raised: set[int] = set()
        """Those of other ranks that have ended what this rank did."""
        self._past: set[int] = set()
        """Those after which this rank has resumed."""
        self._final: set[int] = set()
        """Those after which nobody resumes."""
        self._due: dict[int, Failure] = {}
        """Differences between ranks, taken back or not, until this rank resumes after them.

        Their finder may resume before another rank has read of them, which must not find the same
        difference then and publish it a second time.
        """

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [other for other in range(self.world_size) if other != self.rank]

    # ---------------------------------------------------------------- coming and going

    def sign_in(self, entry: Mapping[str, Any]) -> None:
        """Announce this rank with its ``entry``; read the board from now on."""
        self.ranks.sign_in(entry, is_hosting=self._is_hosting)
        self.board.look = self.read

    def stop(self) -> None:
        """End the thread. The notices stay."""
        self.board.stop()

    def erase(self) -> None:
        """Remove the notices, so that a finished run leaves nothing in the store.

        The first one goes last: the other ranks wait for that.
        """
        for slot in range(self._seen, 0, -1):
            self.board.delete_key(f"slot/{slot}")

    # ---------------------------------------------------------------- this rank's side

    def publish(self, error: BaseException, *, is_cause: bool = False) -> None:
        """Tell the other ranks that this one raised ``error``, unless a rank failed before.

        A communication error follows from another rank's failure and is not posted, unless it
        ``is_cause``.
        """
        self._gave_up = self._gave_up or (phase_text(), type(error).__name__)
        if isinstance(error, CommunicationError) and not is_cause:
            return
        failure = self._failure_of(error)
        with self._publishing(failure):
            has_posted = self.board.run(lambda: self._post_first(failure, is_difference=is_cause))
            self._posted = has_posted or self._posted

    def end(self, error: BaseException) -> None:
        """Tell the other ranks that ``error`` ends this one's part in the run."""
        self.has_raised = True
        failure = self._failure_of(error)
        with self._publishing(failure):
            if not self._posted:
                post = functools.partial(self._post_first, failure, is_difference=False)
                self._posted = self.board.run(post)
            if self._posted:
                self._post({"kind": "ended", "rank": self.rank})

    def post_failure(self, failure: Failure) -> None:
        """Post ``failure`` for good; the first one in force applies to every rank."""
        with self._publishing(failure):
            self._post(_notice_of(failure, self._past, is_final=True))

    def go_on(self) -> None:
        """Start over: failures that this rank has published or raised no longer apply to it.

        Failures of ranks that have ended cannot be withdrawn; waits for those ranks show them. The
        same error, raised by another rank a little later, does not apply to this rank either.
        """
        if self._gave_up is not None:
            self._attempt += 1
            self._left, self._gave_up = self._gave_up, None
        if self._posted:
            self._posted = False
            self._post({"kind": "recovered", "rank": self.rank})
        for slot in list(self._raised):
            self._due.pop(slot, None)
        self._past |= self._raised
        self._raised.clear()

    def deviate(self, text: str) -> None:
        """Announce what this rank is about to do differently; "" withdraws it.

        Other ranks show it when they wait in vain for this rank.
        """
        self._post({"kind": "deviation", "rank": self.rank, "text": text})

    def said(self) -> list[str]:
        """List the deviations that ranks have announced, one phrase each."""
        return [f"rank {rank} had said: {text}" for rank, text in self.deviations.items() if text]

    def check(self) -> None:
        """Raise `RankFailedError` when a peer has failed, or has declared this rank lost."""
        found = self._first(of_others=True)
        if found is not None:
            self._ended_by(*found)
            raise self._error_of(found[1])
        if self.board.lost is not None:
            raise RankFailedError(str(self.board.lost), self.board.lost.rank)

    @property
    def failure(self) -> Failure | None:
        """The first failure in force, as far as this rank has read it and not resumed since."""
        found = self._first(is_due=False)
        return None if found is None else found[1]

    @property
    def mismatch(self) -> str:
        """The text of the mismatch that `check` raises for, or ""."""
        found = self._first(of_others=True)
        return found[1].error if found is not None and found[1].is_mismatch else ""

    def look(self) -> None:
        """Read the board, if it can be reached, and `check`."""
        with contextlib.suppress(RankFailedError):  # what stands already comes before that
            self.read()
        self.check()

    @property
    def trouble(self) -> RankFailedError | None:
        """The error that `check` would raise now, without raising it."""
        found = self._first(of_others=True)
        return self.board.lost if found is None else self._error_of(found[1])

    @property
    def ending(self) -> RankFailedError | None:
        """The error of a run that another rank has ended for good; None while it may continue."""
        for slot in sorted(self._final & self._standing.keys()):
            if self._standing[slot].rank != self.rank or self._standing[slot].by != self.rank:
                return self._error_of(self._standing[slot])
        return self.board.lost

    def fence(self, rank: int) -> None:
        """Kill ``rank`` if it is a stopped process of this host, so that it cannot wake up later.

        Only a stopped process: a slow one may still end by itself.
        """
        process, look = self.ranks.processes.get(rank), self.ranks.look_at(rank)
        if process is not None and look is not None and look.is_stopped:
            os.kill(process.pid, signal.SIGKILL)
            _log.warning("rank %d kills rank %d, a stopped process", self.rank, rank)

    def report(self, topic: str, text: str, *, everywhere: bool = True) -> None:
        """Log ``text`` on every rank, or on one, once for each ``topic``."""
        if self.board.add(f"reports/{topic}", 1) == 1:
            if everywhere:
                self._post({"kind": "report", "text": text})
            else:
                _log.warning("%s", text)
        self.read()

    # ---------------------------------------------------------------- the board

    def read(self) -> None:
        """Read the notices posted since the last look."""
        self.board.run(self._read)

    def roll_call(self, patience: float = PATIENCE, about: Iterable[int] = ()) -> Answers:
        """Ask every rank for its status; return the answers within ``patience`` seconds, by rank.

        Ranks that can inspect the processes of ranks ``about`` report what they see. A recent call
        by another rank is reused, unless it was about fewer ranks.
        """
        wanted = frozenset(about)
        text, slot = self._text({"kind": "call", "about": sorted(wanted)}), self._shared(wanted)
        while slot is None:
            slot = self._try_post(text) or self._shared(wanted)
        return self.ranks.collect(slot, patience, wanted)

    def leads(self, place: str) -> bool:
        """Check whether this rank makes roll calls for all that wait at ``place``.

        The first `LEADERS` ranks to arrive in each turn do; the others read their results.
        """
        if self.world_size <= LEADERS:
            return True
        turn = int(self.clock.wall() // TURN)
        if self._turns.get(place, (-1, False))[0] != turn:
            if len(self._turns) > REMEMBERED:
                del self._turns[next(iter(self._turns))]
            is_leading = self.board.add(f"leads/{place}/{turn}", 1) <= LEADERS
            self._turns[place] = turn, is_leading
        return self._turns[place][1]

    # ---------------------------------------------------------------- private

    def _error_of(self, failure: Failure) -> RankFailedError:
        if failure.rank != self.rank:
            return RankFailedError(str(failure), failure.rank)
        return RankFailedError(
            f"rank {self.rank} (this one) was declared lost by rank {failure.by}: "
            f"{failure.error}; its peers continued without it",
            failure.rank,
        )

    @contextlib.contextmanager
    def _publishing(self, failure: Failure) -> Iterator[None]:
        """Log ``failure`` if the block cannot reach the store to publish it."""
        try:
            yield
        except RankFailedError:
            text = f"{failure.error} ({failure.line})" if failure.line else failure.error
            _log.warning("rank %d cannot reach the store to publish: %s", self.rank, text)

    def _failure_of(self, error: BaseException) -> Failure:
        return Failure(
            rank=self.rank,
            by=self.rank,
            phase=phase_text(),
            operation=last_operation(),
            error=one_line(error),
            line=source_line(error),
            attempt=self._attempt,
        )

    def found_ended(self, rank: int) -> None:
        """Publish, in the board's thread, that ``rank`` has ended, unless it had left or failed."""
        failure = Failure(
            rank=rank,
            by=self.rank,
            error="its process has ended without a word (killed, or by os._exit)",
        )
        if self.board.lost is not None:  # its host failed before, and this rank may have for that
            return
        try:
            self._read()
            self.ranks.read_left()
            if rank in self.ranks.left or self._final & self._standing.keys():
                return  # whoever has ended the run, this one or another, was first
            if any(other.rank == rank for other in self._standing.values()):
                self._post({"kind": "ended", "rank": rank})
            else:
                self._post(_notice_of(failure, self._standing, is_final=True))
        except RankFailedError:  # the store has gone with it, or soon after
            if not self.ranks.has_ended(self.board.host) and self.failure is None:
                self._standing[0] = failure
                self._final.add(0)
                self.board.nudge()

    def _post_first(self, failure: Failure, *, is_difference: bool) -> bool:
        """Post ``failure`` unless one is in force; two ranks that raise together post one.

        A difference between ranks is not posted either after another that this rank has not resumed
        from: it may be the same. Its other errors are posted then and supersede it.
        """
        while True:
            self._read()
            slot = self._seen + 1  # taken, when something is read before the next line
            found = self._first(is_due=is_difference)
            if found is not None:
                self._ended_by(*found)
                return False
            text = self._text(_notice_of(failure, self._past, is_difference=is_difference))
            if self.board.compare_set(f"slot/{slot}", "", text) == text:
                self._raised.update(list(self._due))
                self._read()
                return True

    def _post(self, notice: Mapping[str, Any]) -> int:
        """Take the next free slot for ``notice``, and read the board; returns the slot's number."""
        text = self._text(notice)
        while (slot := self._try_post(text)) is None:
            pass
        return slot

    def _try_post(self, text: str) -> int | None:
        """Put ``text`` into the next slot, and read the board; None if another rank was faster."""
        slot = self._seen + 1
        is_won = self.board.compare_set(f"slot/{slot}", "", text) == text
        self.read()
        return slot if is_won else None

    def _shared(self, about: frozenset[int]) -> int | None:
        """Return the slot of a recent roll call about at least these ranks."""
        slot, when, asked = self._called
        return slot if about <= asked and self.clock.now() - when <= SHARED_FOR else None

    def _text(self, notice: Mapping[str, Any]) -> str:
        return json.dumps({**notice, "from": f"{self.rank}-{time.monotonic_ns()}"})

    def _first(self, *, of_others: bool = False, is_due: bool = True) -> tuple[int, Failure] | None:
        """Return the first failure that applies to this rank, with its slot.

        Without ``is_due`` only failures in force count.
        """
        failures = {**self._due, **self._standing} if is_due else dict(self._standing)
        for slot in sorted(failures):
            failure = failures[slot]
            is_own = failure.rank == failure.by == self.rank
            if slot not in self._past and not (is_own and of_others):
                return slot, failure
        return None

    def _ended_by(self, slot: int, failure: Failure) -> None:
        """Note what ended this rank's work; it can resume only from what is not final."""
        if slot not in self._final and failure.rank != self.rank:
            self._raised.add(slot)

    def _read(self) -> None:
        self.ranks.read()
        while (text := self.board.get(f"slot/{self._seen + 1}")) is not None:
            self._seen += 1
            self._attend(self._seen, text)

    def _attend(self, slot: int, text: str) -> None:
        kind = (object_of(text, {"kind": str}) or {"kind": ""})["kind"]
        notice = object_of(text, _NOTICES.get(kind, {"kind": type(None)}))
        if notice is None or not STORE <= notice.get("rank", 0) < self.world_size:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "rank %d ignores a notice on the run's board that is none of Meshwright's: "
                    "%.100r; does another program use the store?",
                    self.rank,
                    text,
                )
        elif kind == "failed":
            self._attend_failure(slot, notice)
        elif kind == "recovered":
            for at, failure in list(self._standing.items()):
                if failure.rank == notice["rank"] and at not in self._final:
                    del self._standing[at]
                    self._past.discard(at)
                    if at not in self._due:
                        self._raised.discard(at)
        elif kind == "ended":
            self._final |= {at for at, f in self._standing.items() if f.rank == notice["rank"]}
        elif kind == "call":
            about = frozenset(rank for rank in notice["about"] if isinstance(rank, int))
            self._called = slot, self.clock.now(), about
            self.ranks.answer(slot, about)
        elif kind == "deviation":
            self.deviations[notice["rank"]] = notice["text"]
        elif kind == "report":
            _log.warning("%s", notice["text"])

    def _attend_failure(self, slot: int, notice: Mapping[str, Any]) -> None:
        if not self._standing.keys() <= {at for at in notice["past"] if isinstance(at, int)}:
            return
        failure = Failure(**{name: notice[name] for name in _OF_A_FAILURE})
        if notice["is_final"]:
            self._final.add(slot)
        elif notice["is_difference"] and failure.rank != self.rank:
            self._due[slot] = failure
        elif failure.attempt < self._attempt and self._left == failure.what:
            self._past.add(slot)
        self._standing[slot] = failure
        self.board.nudge()
        self.board.append("heard", f"{self.rank}\n")


def _notice_of(
    failure: Failure, past: Iterable[int], *, is_final: bool = False, is_difference: bool = False
) -> dict[str, Any]:
    kind = {"kind": "failed", "is_final": is_final, "is_difference": is_difference}
    return {
        **kind,
        **{name: getattr(failure, name) for name in _OF_A_FAILURE},
        "past": sorted(past),
    }
