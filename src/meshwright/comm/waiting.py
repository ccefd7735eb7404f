"""The bounded wait: what happens after a wait has not ended at once.

Every slice looks at the board of `failure`. After ``hang_after`` seconds the missing ranks are
named on every rank, once; at the bound the wait gives up, unless a missing rank is compiling or in
a phase with a longer limit of its own.

Compiled graphs wait in operators of torch: what a transport raises there is explained when it ends
the process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.comm.failure import PATIENCE, Failure, FailureMonitor, one_line
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    RankFailedError,
)

if TYPE_CHECKING:
    from meshwright.comm.pending import Pending

__all__ = ["Watch", "blame"]

Answers = Mapping[int, Mapping[str, Any]]

MISMATCH_AFTER = 3.0
"""Seconds after which a wait looks whether the other ranks do something else or have left."""

GRACE = 1.0
"""Seconds in which a rank that closed its connections may still say why."""

_OF_A_TRANSPORT = re.compile(r"gloo/|\[Gloo\]", re.IGNORECASE)
"""What Gloo says of itself when it has lost a peer."""


def blame(monitor: FailureMonitor, error: BaseException) -> str:
    """Which rank failed first, where ``error`` came of it outside of our waits; "" if unknown.

    A rank that is lost without a word is put on the board.
    """
    is_raw = type(error) is RuntimeError and _OF_A_TRANSPORT.search(str(error)) is not None
    if not is_raw and not isinstance(error, RankFailedError):
        return ""
    try:
        _look_for_the_first(monitor, error if is_raw else None)
    except RuntimeError:  # the run's store is gone, which `FailureMonitor.publish` says
        return ""
    first = "" if monitor.failure is None else str(monitor.failure)
    return "" if first in str(error) else first


def _look_for_the_first(monitor: FailureMonitor, error: BaseException | None) -> None:
    """Wait until a failure stands on the board; put a lost rank there where ``error`` is raw."""
    until = time.monotonic() + GRACE
    while monitor.failure is None and time.monotonic() < until:
        time.sleep(0.05)
        monitor.read()
    if monitor.failure is not None or error is None:
        return
    answers = monitor.roll_call(PATIENCE / 2)
    lost = [rank for rank in range(monitor.world_size) if rank not in answers]
    if lost:
        text = (
            f"it does not answer (killed, or cut off from the network); rank {monitor.rank} found "
            f"out outside of a wait of its own: {one_line(error)}"
        )
        monitor.post_failure(
            Failure(rank=lost[0], by=monitor.rank, phase="", operation="", error=text, line="")
        )


class Watch:
    """The watch over one pending operation of this rank."""

    def __init__(self, monitor: FailureMonitor, pending: Pending, timeout: float | None) -> None:
        self._monitor = monitor
        self._pending = pending
        self._bound = pending.communicator.timeout if timeout is None else timeout
        self._start = time.monotonic()
        self._give_up = self._start + self._bound
        self._report_at = self._start + monitor.hang_after
        self._has_excused = False
        """Whether the bound was last put off for a rank that may take its time."""
        self._compare_at = self._start + min(monitor.hang_after, MISMATCH_AFTER)

    def look(self) -> None:
        """Raise when a peer has failed or the bound has passed; report a hang once."""
        self._check()
        now = time.monotonic()
        if now >= self._give_up:
            self._end(self._ask())
        elif now >= self._compare_at:
            answers = self._ask()
            if self._mismatched(answers) or self._leaving(answers):
                self._end(answers)
            self._compare_at = self._report_at if now < self._report_at else float("inf")
            if now < self._report_at:
                return
            text = self._describe(answers, now - self._start)
            self._monitor.report(f"{self._pending.communicator.name}/{self._topic()}", text)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise the reason why the transport gave ``error``, naming the rank behind it."""
        if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError):
            raise error  # by a transport of ours, which names the ranks itself
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            self._check(error)
            time.sleep(0.05)
        if isinstance(error, RankFailedError):
            raise error  # the same: nobody has said more within the grace
        answers = self._ask(error)
        self._check(error)
        lost = self._lost(answers)
        if lost:
            self._declare_lost(lost[0], error)
        raise CommunicationError(
            f"{self._pending.describe()} failed although every rank of the axis answers: "
            + "; ".join([one_line(error), *self._monitor.said()])
        ) from error

    # ---------------------------------------------------------------- steps

    def _check(self, error: BaseException | None = None) -> None:
        try:
            self._monitor.read()
        except RuntimeError as lost_store:
            error = error or lost_store
            self._monitor.lost_store(lost_store)
        try:
            self._monitor.check()
        except RankFailedError as failed:
            raise RankFailedError(
                f"{failed}; rank {self._monitor.rank} was waiting for {self._pending.describe()}",
                failed.rank,
            ) from error

    def _ask(self, error: BaseException | None = None) -> Answers:
        """Roll call. After an error of the transport a dead rank is known soon."""
        try:
            return self._monitor.roll_call(PATIENCE if error is None else PATIENCE / 2)
        except RuntimeError as lost_store:
            self._monitor.lost_store(lost_store)
            self._check(error or lost_store)
            raise

    def _end(self, answers: Answers) -> None:
        """Give up, naming the culprits on the board, unless one of them may take its time."""
        missing = self._missing(answers)
        has_reason = any(answers[r].get("compiling") or answers[r].get("excused") for r in missing)
        # Who was waited for may have come just now: its operation gets the bound of any other.
        has_reason, self._has_excused = (
            has_reason or (self._has_excused and not missing),
            has_reason,
        )
        if has_reason and not self._lost(answers) and not self._mismatched(answers):
            self._give_up = time.monotonic() + self._bound
            return
        text = self._describe(answers, time.monotonic() - self._start)
        culprit = next(iter([*self._lost(answers), *missing]), self._monitor.rank)
        state = answers.get(culprit, {})
        self._monitor.post_failure(
            Failure(
                rank=culprit,
                by=self._monitor.rank,
                phase=str(state.get("phase", "")),
                operation="",
                error=text,
                line=str(state.get("line", "")),
            )
        )
        for rank in self._lost(answers):
            self._monitor.fence(rank)
        differs = self._mismatched(answers) or self._leaving(answers)
        kind = CollectiveMismatchError if differs else CollectiveTimeoutError
        raise kind(text)

    def _declare_lost(self, rank: int, error: BaseException) -> NoReturn:
        text = (
            "it does not answer (killed, or cut off from the network) while rank "
            f"{self._monitor.rank} waited for {self._pending.describe()}"
        )
        text = "; ".join([text, *self._monitor.said()])
        self._monitor.post_failure(
            Failure(rank=rank, by=self._monitor.rank, phase="", operation="", error=text, line="")
        )
        raise RankFailedError(f"rank {rank} failed first: {text}", rank) from error

    # ---------------------------------------------------------------- who is missing

    def _topic(self) -> str:
        return f"{self._key(self._monitor.rank)}/{self._pending.sequence}"

    def _key(self, rank: int) -> str:
        """Under which count ``rank`` numbers its side of the operation."""
        pending = self._pending
        if pending.kind not in ("send", "recv"):
            return ""
        if rank == self._monitor.rank:
            return f"{pending.kind}:{pending.peer}"
        other = "recv" if pending.kind == "send" else "send"
        return f"{other}:{pending.communicator.rank}"

    def _peers(self) -> list[int]:
        """The world's numbers of the other ranks that take part."""
        communicator = self._pending.communicator
        if self._pending.kind in ("send", "recv") and self._pending.peer is not None:
            return [communicator.ranks[self._pending.peer]]
        return [rank for rank in communicator.ranks if rank != self._monitor.rank]

    def _lost(self, answers: Answers) -> list[int]:
        return [rank for rank in self._peers() if rank not in answers]

    def _leaving(self, answers: Answers) -> list[int]:
        """Ranks that will never issue the operation: they are done with the run."""
        return [rank for rank in self._missing(answers) if answers[rank].get("leaving")]

    def _missing(self, answers: Answers) -> list[int]:
        """Ranks that answer but have not issued the operation."""
        return [
            rank
            for rank in self._peers()
            if rank in answers and self._issued(answers[rank], rank) <= self._pending.sequence
        ]

    def _issued(self, answer: Mapping[str, Any], rank: int) -> int:
        group = answer["groups"].get(self._pending.communicator.name, {})
        return int(group.get("counts", {}).get(self._key(rank), 0))

    def _mismatched(self, answers: Answers) -> list[str]:
        """What other ranks issued at this number, where it is another operation."""
        pending = self._pending
        found: list[str] = []
        if pending.kind in ("send", "recv"):
            return []
        for rank in self._peers():
            group = answers.get(rank, {"groups": {}})["groups"].get(pending.communicator.name, {})
            for entry in group.get("last", ()):
                at_this_number = entry["sequence"] == pending.sequence
                if entry["kind"] in ("send", "recv") or not at_this_number:
                    continue
                if (entry["kind"], entry["label"]) != (pending.kind, pending.label):
                    label = f' "{entry["label"]}"' if entry["label"] else ""
                    found.append(f"rank {rank} issued {entry['kind']} #{pending.sequence}{label}")
        return found

    def _describe(self, answers: Answers, seconds: float) -> str:
        parts = [
            f"rank {rank} does not answer (stopped, killed or cut off)"
            for rank in self._lost(answers)
        ]
        parts += self._mismatched(answers)
        for rank in self._missing(answers):
            state = answers[rank]
            phase = f"in {state['phase']} " if state["phase"] else ""
            busy = "compiling " if state["compiling"] else ""
            if state.get("leaving"):
                parts.append(
                    f"rank {rank} is done and leaves the run without it: run as many iterations "
                    "on every rank"
                )
                continue
            parts.append(
                f"rank {rank} has not issued it: it is {busy}{phase}at {state['line']}"
                f"{_last_of(state, self._pending.communicator.name)}"
            )
        parts += self._monitor.said()
        waiting = ", ".join(
            str(r)
            for r in sorted({self._monitor.rank, *self._peers()} & set(answers))
            if r == self._monitor.rank or r not in self._missing(answers)
        )
        reason = "; ".join(parts) or "every rank has issued it: the transport is slow or stuck"
        return (
            f"{self._pending.describe()} has not ended after {seconds:.0f} s: {reason}; "
            f"waiting: rank {waiting}"
        )


def _last_of(state: Mapping[str, Any], name: str) -> str:
    last = state["groups"].get(name, {}).get("last", ())
    if not last:
        return ", nothing issued on this axis yet"
    entry = last[-1]
    label = f' "{entry["label"]}"' if entry["label"] else ""
    return f", last issued {entry['kind']} #{entry['sequence']}{label}"
