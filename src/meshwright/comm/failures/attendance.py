"""Attendance in a run: roll calls, and looks at processes that do not answer.

A rank signs in to the roll with its process. From then on its board's thread answers roll calls,
also while the main thread computes or waits; who cannot answer is looked at by the ranks of its
host.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.comm.failures.board import Board
from meshwright.comm.failures.processes import Look, Process
from meshwright.comm.failures.roll import Roll
from meshwright.comm.failures.whereabouts import answer_of, own_state

PATIENCE = 2.0
"""Seconds in which a rank that can answer a roll call has done so, on a machine with room."""

KEPT = 4
"""Answers of a rank that stay on the board."""

Answers = Mapping[int, Mapping[str, Any]]
"""The answers of ranks, by rank; those that have not answered are missing."""


class Describer(Protocol):
    """Adds to what a rank says of itself. Called from the board's thread."""

    def describe(self) -> Mapping[str, Any]:
        """Return values that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait of a rank, for others that ask."""

    what: str
    number: int
    """Different in every wait of this rank."""


class Attendance:
    """The ranks of the run as this one, ``rank``, knows them."""

    def __init__(self, board: Board, rank: int, world_size: int, process: Process) -> None:
        self.rank = rank
        self.world_size = world_size
        self.roll = Roll(board, rank, world_size, process)
        """The ranks that have come."""
        self.left: dict[int, float] = {}
        """The times, on the monotonic clock, at which ranks have said that they are done."""
        self.is_leaving = False
        """True when this rank is done and only waits for the others."""
        self.describers: MutableMapping[str, Describer] = weakref.WeakValueDictionary()
        """Those that add to this rank's answer to a roll call, by name."""
        self._waits: dict[int, list[Waiting]] = {}
        """Waits of this rank for others, by thread; the last is the inmost."""
        self._wait_count = 0
        self.stuck: Waiting | None = None
        """A call of c10d's that this rank does not come out of."""
        self._board = board
        self._answered: deque[str] = deque()

    def begin_leaving(self) -> None:
        """Say to whoever asks that this rank is done."""
        self.is_leaving = True

    # ---------------------------------------------------------------- roll calls

    def collect(self, slot: int, patience: float, about: Iterable[int] = ()) -> Answers:
        """Wait at most ``patience`` seconds for the answers to the call that has ``slot``."""
        answers: dict[int, Mapping[str, Any]] = {self.rank: self._own_answer(about)}
        missing = set(range(self.world_size)) - {self.rank}
        until, pause = self._board.clock.now() + patience + self._board.every, 0.01
        while missing and self._board.clock.now() < until:
            for rank in sorted(missing):
                answer = answer_of(self._board.get(f"answer/{slot}/{rank}"))
                if answer is not None:
                    answers[rank] = answer
            missing -= set(answers)
            if missing:
                self._board.clock.sleep(pause)
                pause = min(2 * pause, 0.1)
        return answers

    def answer(self, slot: int, about: Iterable[int]) -> None:
        """Answer the call that has ``slot``, with looks at the processes of ranks ``about``."""
        key = f"answer/{slot}/{self.rank}"
        self._board.set(key, json.dumps(self._own_answer(about)))
        self._answered.append(key)
        if len(self._answered) > KEPT:
            self._board.delete_key(self._answered.popleft())

    # ---------------------------------------------------------------- waits of this rank

    def begin_wait(self, what: str) -> None:
        """Note that this thread waits for other ranks from now on, to `end_wait`."""
        self._wait_count += 1
        waiting = Waiting(what=what, number=self._wait_count)
        self._waits.setdefault(threading.get_ident(), []).append(waiting)

    def end_wait(self) -> None:
        """Note that this thread waits no longer."""
        mine = self._waits[threading.get_ident()]
        mine.pop()
        if not mine:
            del self._waits[threading.get_ident()]

    def note_stuck(self, call: Waiting | None) -> None:
        """Note the call of c10d's that this rank does not come out of; None when it has."""
        self.stuck = call

    def is_watched(self, thread: int) -> bool:
        """Tell whether ``thread`` is in a wait of ours, which ends by itself."""
        return thread in self._waits

    def waiting(self) -> Waiting | None:
        """Return what the main thread waits in, as far as it waits for other ranks."""
        mine = self._waits.get(threading.main_thread().ident or 0)
        return mine[-1] if mine else self.stuck

    def _own_answer(self, about: Iterable[int]) -> dict[str, Any]:
        waiting = self.waiting()
        looks = {rank: self.look_at(rank) for rank in about}
        return {
            **own_state(),
            "leaving": self.is_leaving,
            "waiting": {"what": waiting.what, "number": waiting.number} if waiting else {},
            "described": {key: each.describe() for key, each in self.describers.items()},
            "seen": {str(rank): look for rank, look in looks.items() if look is not None},
        }

    # ---------------------------------------------------------------- processes

    def look_at(self, rank: int) -> Look | None:
        """Look at the process of ``rank``; None where this process cannot."""
        process = self.roll.processes.get(rank)
        return process.look() if process is not None and process.is_visible else None

    def has_ended(self, rank: int) -> bool:
        """Tell whether ``rank`` is known to have been a process of this host that is gone."""
        process = self.roll.processes.get(rank)
        return process is not None and process.has_ended

    def kill_stopped(self, rank: int) -> bool:
        """Kill ``rank`` if it is a stopped process of this host; tells whether it was."""
        process, look = self.roll.processes.get(rank), self.look_at(rank)
        if process is None or look is None or not look.is_stopped:
            return False
        os.kill(process.pid, signal.SIGKILL)
        return True
