"""Who failed first: a board on the store that every rank reads, and what a rank says of itself.

Ranks post notices in numbered slots of the store; a slot is won by compare-and-set, so all ranks
see one order. A daemon thread on each rank reads new slots a few times a second and answers roll
calls, also while the main thread computes or waits. A rank that does not answer is lost.

==========  =====================================================================
notice      meaning
==========  =====================================================================
failed      a rank raised, or was found lost; the first one standing counts
            for every rank that has not gone on since it raised for it
recovered   the rank that had failed goes on, after its caller handled the error; a
            difference between ranks still ends, once, what each of the others does
call        everybody answers with where it is, under the slot's number
report      a hang report that every rank logs, once for each operation
deviation   a rank is about to do other than before; "" takes it back
==========  =====================================================================
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from meshwright.comm.registry import PROCESS
from meshwright.errors import CommunicationError, RankFailedError

__all__ = [
    "PATIENCE",
    "Describer",
    "Failure",
    "FailureMonitor",
    "one_line",
    "own_state",
    "source_line",
]

_log = logging.getLogger("meshwright")

PATIENCE = 2.0
"""Seconds after which a rank that has not answered a roll call is taken for lost."""

STORE = -1
"""Stands for the run's store in place of a rank: whoever hosted it has ended."""

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(dist.__file__)).removesuffix("distributed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first failure of a run, as posted on the board."""

    rank: int
    """The world's number of the rank that failed or was lost; `STORE` for the run's store."""
    by: int
    """Who says so: the rank itself, or the one that found it lost."""
    phase: str
    operation: str
    error: str
    line: str
    attempt: int = 0
    """How often the rank that says so had gone on after it raised."""

    @property
    def what(self) -> tuple[str, str]:
        """In which phase it was, and the type of the exception."""
        return self.phase, self.error.partition(":")[0]

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        last = f", after {self.operation}" if self.operation else ""
        line = f" ({self.line})" if self.line else ""
        found = "" if self.by == self.rank or self.rank == STORE else f" [found by rank {self.by}]"
        who = "the run's store" if self.rank == STORE else f"rank {self.rank}"
        return f"{who} failed first{where}{last}: {self.error}{line}{found}"


class Describer(Protocol):
    """Adds to what a rank says of itself. Called from the monitor's thread."""

    def describe(self) -> Mapping[str, Any]:
        """Values that JSON can hold."""
        ...


class FailureMonitor:
    """Posts this rank's failure, reads the others', and answers roll calls. One for a process."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        hang_after: float,
        interval: float = 0.25,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hang_after = hang_after
        """Seconds after which a wait is reported as a hang."""
        self.board = store
        """The store on which the notices stand."""
        self.is_leaving = False
        """Whether this rank is done and only waits for the others."""
        self.deviations: dict[int, str] = {}
        """What ranks have said they do otherwise than before, by rank; hang reports show it."""
        self.describers: MutableMapping[str, Describer] = weakref.WeakValueDictionary()
        """Who adds to this rank's answer to a roll call, by name."""
        # One client of its own for the thread: a client serves one request at a time.
        self._reader = _own_client(store)
        store.set(f"who/{rank}", json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._interval = max(interval, world_size / 2000)
        self._seen = 0
        self._reading = threading.Lock()
        self._posted = False
        self._attempt = 0
        self._gave_up: tuple[str, str] | None = None
        """In which phase this rank has raised since it has gone on, and what, at first."""
        self._left: tuple[str, str] | None = None
        """Those of the attempt before."""
        self._standing: dict[int, Failure] = {}
        """Failures that were not taken back, by slot; the same on every rank."""
        self._raised: set[int] = set()
        """Those of other ranks that have ended what this rank did."""
        self._past: set[int] = set()
        """Those that this rank has gone on after."""
        self._final: set[int] = set()
        """Those that nobody goes on after."""
        self._due: dict[int, Failure] = {}
        """Differences between ranks, taken back or not, until this rank goes on after them.

        Their finder may go on before another rank has read of them, which must not find the same
        difference then and publish it a second time.
        """
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-monitor", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- this rank's side

    def publish(self, error: BaseException, *, is_cause: bool = False) -> None:
        """Tell the other ranks that this one raised ``error``, unless somebody failed before.

        An error of communication follows from another rank's, unless it ``is_cause`` itself.
        """
        self._gave_up = self._gave_up or (_phase(), type(error).__name__)
        if isinstance(error, CommunicationError) and not is_cause:
            return
        failure = Failure(
            rank=self.rank,
            by=self.rank,
            phase=_phase(),
            operation=_last_operation(),
            error=one_line(error),
            line=source_line(error),
            attempt=self._attempt,
        )
        try:
            self._posted = self._post_first(failure, is_difference=is_cause) or self._posted
        except RuntimeError:
            _log.warning("rank %d cannot reach the store to publish: %s", self.rank, failure)

    def _post_first(self, failure: Failure, *, is_difference: bool) -> bool:
        """Post ``failure`` unless one stands; two ranks that raise together post one.

        A difference that this rank finds is not posted either after another that it has not gone
        on after: it may be the same. What else it raises is posted then, and ends it for both.
        """
        own = {**_values(failure), "is_final": False, "is_difference": is_difference}
        while True:
            self.read()
            slot = self._seen + 1  # taken, when something is read before the next line
            found = self._first(is_due=is_difference)
            if found is not None:
                self._ended_by(*found)
                return False
            text = self._text({**own, "past": sorted(self._past)})
            if self.board.compare_set(f"slot/{slot}", "", text).decode() == text:
                self._raised.update(list(self._due))
                self.read()
                return True

    def post_failure(self, failure: Failure) -> None:
        """Put ``failure`` on the board, for good; the first one standing counts for every rank."""
        own = {**_values(failure), "is_final": True, "is_difference": False}
        try:
            self._post({**own, "past": sorted(self._past)})
            self.read()
        except RuntimeError:
            _log.warning("rank %d cannot reach the store to publish: %s", self.rank, failure)

    def go_on(self) -> None:
        """This rank begins anew: what it has published or raised for ends nothing any more.

        What others do not take back, because they have ended, shows when this rank waits for them.
        A rank that raises the same a little later gives up what this one has given up before.
        """
        if self._gave_up is not None:
            self._attempt += 1
            self._left, self._gave_up = self._gave_up, None
        if self._posted:
            self._posted = False
            self._post({"kind": "recovered", "rank": self.rank})
            self.read()
        for slot in list(self._raised):
            self._due.pop(slot, None)
        self._past |= self._raised
        self._raised.clear()

    def deviate(self, text: str) -> None:
        """Say what this rank is about to do otherwise than before; "" takes it back.

        The others show it when they wait in vain for this rank.
        """
        self._post({"kind": "deviation", "rank": self.rank, "text": text})
        self.read()

    def said(self) -> list[str]:
        """What ranks have said they do otherwise than before, one phrase each."""
        return [f"rank {rank} had said: {text}" for rank, text in self.deviations.items() if text]

    def check(self) -> None:
        """Raise `RankFailedError` when a peer has failed, or has declared this rank lost."""
        found = self._first(of_others=True)
        if found is None:
            return
        self._ended_by(*found)
        _, failure = found
        if failure.rank == self.rank:
            raise RankFailedError(
                f"rank {self.rank} (this one) was declared lost by rank {failure.by}: "
                f"{failure.error}; its peers have gone on without it",
                failure.rank,
            )
        raise RankFailedError(str(failure), failure.rank)

    @property
    def failure(self) -> Failure | None:
        """The first failure that stands, as far as this rank has read and not gone on after it."""
        found = self._first(is_due=False)
        return None if found is None else found[1]

    def fence(self, rank: int) -> None:
        """End ``rank`` if it is a stopped process of this host: it must not wake up later.

        Only a stopped process: one that is merely slow to answer may still end by itself.
        """
        pid = self._process_here(rank)
        if pid and _state_of(pid) in ("T", "t"):
            _log.warning("rank %d kills rank %d, a stopped process", self.rank, rank)
            os.kill(pid, signal.SIGKILL)

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` is known to have been a process of this host that is gone."""
        pid = self._process_here(rank) if _state_of(os.getpid()) else 0
        return pid > 0 and _state_of(pid) in ("", "Z", "X")

    def _process_here(self, rank: int) -> int:
        """The process of ``rank``; 0 on another host."""
        key = f"who/{rank}"
        who = json.loads(self.board.get(key)) if self.board.check([key]) else {}
        return int(who["pid"]) if who.get("host") == socket.gethostname() else 0

    def report(self, topic: str, text: str) -> None:
        """Let every rank log ``text``, once for each ``topic``."""
        if self.board.add(f"reports/{topic}", 1) == 1:
            self._post({"kind": "report", "text": text})
        self.read()

    def stop(self) -> None:
        """End the thread. The board stays as it is."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def erase(self) -> None:
        """Remove the notices, so that nothing of a finished run is left on the store."""
        for slot in range(1, self._seen + 1):
            self.board.delete_key(f"slot/{slot}")

    # ---------------------------------------------------------------- the board

    def read(self) -> None:
        """Read the notices posted since the last look."""
        with self._reading:
            while self._reader.check([f"slot/{self._seen + 1}"]):
                self._seen += 1
                self._attend(self._seen, json.loads(self._reader.get(f"slot/{self._seen}")))

    def own_answer(self) -> dict[str, Any]:
        """`own_state`, with what the describers add."""
        described = {key: describer.describe() for key, describer in self.describers.items()}
        return {**own_state(), "leaving": self.is_leaving, "described": described}

    def roll_call(self, patience: float = PATIENCE) -> dict[int, Mapping[str, Any]]:
        """Ask every rank where it is; the answers within ``patience`` seconds, by rank."""
        slot = self._post({"kind": "call"})
        self.read()
        missing = set(range(self.world_size)) - {self.rank}
        answers: dict[int, Mapping[str, Any]] = {self.rank: self.own_answer()}
        until = time.monotonic() + patience + self._interval
        while missing and time.monotonic() < until:
            for rank in sorted(missing):
                if self.board.check([f"answer/{slot}/{rank}"]):
                    answers[rank] = json.loads(self.board.get(f"answer/{slot}/{rank}"))
            missing -= set(answers)
            if missing:
                time.sleep(0.02)
        return answers

    def _post(self, notice: Mapping[str, Any]) -> int:
        """Win the next free slot for ``notice``; its number."""
        text = self._text(notice)
        slot = self._seen + 1
        while self.board.compare_set(f"slot/{slot}", "", text).decode() != text:
            slot += 1
        return slot

    def _text(self, notice: Mapping[str, Any]) -> str:
        return json.dumps({**notice, "from": f"{self.rank}-{time.monotonic_ns()}"})

    def _first(self, *, of_others: bool = False, is_due: bool = True) -> tuple[int, Failure] | None:
        """The first failure that ends what this rank does, with its slot.

        Without ``is_due`` only failures that stand count.
        """
        failures = {**self._due, **self._standing} if is_due else dict(self._standing)
        for slot in sorted(failures):
            failure = failures[slot]
            is_own = failure.rank == failure.by == self.rank
            if slot not in self._past and not (is_own and of_others):
                return slot, failure
        return None

    def _ended_by(self, slot: int, failure: Failure) -> None:
        """What this rank does ends here. It cannot go on after a rank that was found lost."""
        if slot not in self._final and failure.rank != self.rank:
            self._raised.add(slot)

    def _attend(self, slot: int, notice: Mapping[str, Any]) -> None:
        kind = notice["kind"]
        if kind == "failed" and self._standing.keys() <= set(notice["past"]):
            failure = Failure(**{name: notice[name] for name in Failure.__slots__})
            if notice["is_final"]:
                self._final.add(slot)
            elif notice["is_difference"] and failure.rank != self.rank:
                self._due[slot] = failure
            elif failure.attempt < self._attempt and self._left == failure.what:
                self._past.add(slot)
            self._standing[slot] = failure
        elif kind == "recovered":
            for at, failure in list(self._standing.items()):
                if failure.rank == notice["rank"] and at not in self._final:
                    del self._standing[at]
                    self._past.discard(at)
                    if at not in self._due:
                        self._raised.discard(at)
        elif kind == "call":
            self._reader.set(f"answer/{slot}/{self.rank}", json.dumps(self.own_answer()))
        elif kind == "deviation":
            self.deviations[notice["rank"]] = notice["text"]
        elif kind == "report":
            _log.warning("%s", notice["text"])

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.read()
            except RuntimeError as error:
                if not self._stop.is_set():
                    self.lost_store(error)
                return

    def lost_store(self, error: RuntimeError) -> None:
        """Take note that the store does not answer any more: its host has ended."""
        if self.failure is None:
            self._final.add(0)
            self._standing[0] = Failure(
                rank=STORE,
                by=self.rank,
                phase="",
                operation="",
                error="it cannot be reached: the process that hosts it (rank 0, or torchrun's "
                f"agent) has ended: {one_line(error)}",
                line="",
            )


def _values(failure: Failure) -> dict[str, Any]:
    return {"kind": "failed", **{name: getattr(failure, name) for name in Failure.__slots__}}


def _state_of(pid: int) -> str:
    """The letter that Linux gives the state of a process; "" for none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def own_state() -> dict[str, Any]:
    """What this process can say of itself: phase, source line, and its last operations."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    now = time.monotonic()
    groups = {}
    for communicator in list(PROCESS.communicators.values()):
        groups[communicator.name] = {
            "axis": communicator.axis,
            "counts": dict(communicator.counts),
            "last": [
                {"sequence": i.sequence, "kind": i.kind, "label": i.label}
                for i in list(communicator.issued)
            ],
        }
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "phase": _phase(),
        "line": _line_of_frame(frame),
        "compiling": _is_compiling(frame),
        "excused": any(record.excused_until > now for record in list(PROCESS.phases)),
        "groups": groups,
    }


def source_line(error: BaseException) -> str:
    """The user's line that led to ``error``: the innermost frame outside the libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _line_of_frame(frame: FrameType | None) -> str:
    innermost = frame
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    if innermost is None:
        return ""
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno} in {innermost.f_code.co_name}"


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        filename = frame.f_code.co_filename
        if "/torch/_dynamo/convert_frame" in filename or "/torch/_inductor/" in filename:
            return True
        frame = frame.f_back
    return False


def _phase() -> str:
    return " > ".join(str(record) for record in list(PROCESS.phases))


def _last_operation() -> str:
    last = [c.issued[-1] for c in list(PROCESS.communicators.values()) if c.issued]
    return str(last[-1]) if last else ""


def one_line(error: BaseException) -> str:
    """Type and text of ``error`` in one bounded line."""
    # c10d appends a C++ stack, which says nothing of the run.
    text = " ".join(str(error).split("\nException raised from", 1)[0].split())
    if len(text) > 500:
        text = text[:500] + " [...]"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _own_client(store: dist.Store) -> dist.Store:
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone()
    except (RuntimeError, NotImplementedError):
        return store
