"""Attendance in a run: roll calls, and looks at processes that do not answer.

A rank signs in to the roll with its process. From then on its board's thread answers roll calls,
also while the main thread computes or waits; who cannot answer is looked at by the ranks of its
host.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from meshwright.comm.failures.board import Board, Gathering
from meshwright.comm.failures.processes import Look, Process
from meshwright.comm.failures.roll import Roll
from meshwright.comm.failures.whereabouts import answer_of, own_state

PATIENCE = 2.0
"""Seconds within which a rank that can answer a roll call does so, given a core to run on."""

LISTED = 64
"""Ranks of a group that an answer names one by one."""

KEPT = 4
"""Roll calls whose answers stay on the board, of those that a rank has read."""

CONTROL = " (control)"
"""The end of the name of a control channel, behind that of its group."""

Answers = Mapping[int, Mapping[str, Any]]
"""The answers of ranks, by rank; those that have not answered are missing."""


class Describer(Protocol):
    """Adds to what a rank says of itself. Called from the board's thread."""

    def describe(self) -> Mapping[str, Any]:
        """Return values that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Whom a wait needs, so that each rank can tell who has not done its part.

    A rank has done it when it waits at the same ``place``, or has counted past ``number`` under
    ``key`` of ``channel``.
    """

    ranks: Sequence[int] | None = ()
    """The world's numbers of the ranks; None for all that have the channel, where that are many."""
    channel: str = ""
    key: str = ""
    number: int = 0
    place: str = ""


    @staticmethod
    def listed(ranks: Sequence[int]) -> Sequence[int] | None:
        """List ``ranks`` unless each answer of a large world would repeat them."""
        return ranks if len(ranks) <= LISTED else None


NOBODY = Need()
"""The need of a wait of which no more is known than that this rank waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait of a rank, for others that ask."""

    what: str
    number: int
    """Different in every wait of this rank."""
    need: Callable[[], Need] = lambda: NOBODY
    """Tells, whenever it is asked, whom the wait needs."""

    def values(self) -> dict[str, Any]:
        """Return what others hear of it, as JSON can hold it."""
        return {"what": self.what, "number": self.number, "need": asdict(self.need())}


class Attendance:
    """The ranks of the run as this one, ``rank``, knows them."""

    def __init__(self, board: Board, rank: int, world_size: int, process: Process) -> None:
        self.rank = rank
        self.world_size = world_size
        self.roll = Roll(board, rank, world_size, process)
        """The ranks that have come."""
        self.left: dict[int, float] = {}
        """The times, by the wall clock, at which ranks have said that they are done, as far as
        `read_left` has found."""
        self.is_leaving = False
        """True when this rank is done and only waits for the others."""
        self.describers: MutableMapping[str, Describer] = weakref.WeakValueDictionary()
        """Those that add to this rank's answer to a roll call, by name."""
        self._waits: dict[int, list[Waiting]] = {}
        """Waits of this rank for others, by thread; the last is the innermost."""
        self._wait_count = 0
        self.stuck: Waiting | None = None
        """A call of c10d that has not returned on this rank."""
        self._board = board
        self._others = frozenset(range(world_size)) - {rank}
        self._collected: deque[str] = deque()
        """Keys of the answers that this rank has read."""

    @functools.cached_property
    def end(self) -> Gathering:
        """The coming of all ranks to the end of the run."""
        return Gathering(self._board, f"end/{self.roll.meeting}", self.world_size)

    @functools.cached_property
    def gone(self) -> Gathering:
        """The parting of all ranks, when each has seen that all have come to the end."""
        return Gathering(self._board, f"gone/{self.roll.meeting}", self.world_size)

    def leave(self) -> None:
        """Tell the others that this rank is done."""
        self.is_leaving = True
        self.end.come(f"{self.rank} {self._board.clock.wall():.0f}")

    def read_left(self) -> None:
        """Read from the board who has left the run."""
        for line in self.end.lines():
            rank, *when = [int(word) for word in line.split() if word.isdecimal()] or [-1]
            if len(when) == 1 and 0 <= rank < self.world_size:
                self.left[rank] = when[0]

    # ---------------------------------------------------------------- roll calls

    def collect(self, slot: int, patience: float, about: Iterable[int] = ()) -> Answers:
        """Wait at most ``patience`` seconds for the answers to the call that has ``slot``."""
        clock, every = self._board.clock, self._board.every
        key, until = self._answers(slot), clock.now() + patience + every
        answers: dict[int, Mapping[str, Any]] = {}
        while len(answers) < self.world_size - 1 and clock.now() < until:
            clock.sleep(every / 2)  # ranks answer at their next look
            lines = (self._board.get(key) or "").splitlines()
            for rank, _, text in (line.partition(" ") for line in lines):
                answer = answer_of(text)
                if rank.isdecimal() and int(rank) in self._others and answer is not None:
                    answers[int(rank)] = answer
        if key not in self._collected:
            self._collected.append(key)
        if len(self._collected) > KEPT:
            self._board.delete_key(self._collected.popleft())
        return {self.rank: self._own_answer(about), **answers}

    def answer(self, slot: int, about: Iterable[int]) -> None:
        """Answer the call that has ``slot``, with looks at the processes of ranks ``about``."""
        text = json.dumps(self._own_answer(about))
        self._board.append(self._answers(slot), f"{self.rank} {text}\n")

    def _answers(self, slot: int) -> str:
        return f"answers/{self.roll.meeting}/{slot}"

    # ---------------------------------------------------------------- waits of this rank

    def begin_wait(self, what: str, need: Callable[[], Need]) -> int:
        """Note that this thread waits for other ranks, to `end_wait`; returns the wait's number."""
        self._wait_count += 1
        waiting = Waiting(what=what, number=self._wait_count, need=need)
        self._waits.setdefault(threading.get_ident(), []).append(waiting)
        return waiting.number

    def end_wait(self) -> None:
        """Note that this thread waits no longer."""
        mine = self._waits[threading.get_ident()]
        mine.pop()
        if not mine:
            del self._waits[threading.get_ident()]

    def note_stuck(self, call: Waiting | None) -> None:
        """Note the call of c10d that does not return on this rank; None once it has."""
        self.stuck = call

    def is_watched(self, thread: int) -> bool:
        """Tell whether ``thread`` is in a wait of ours, which ends by itself."""
        return thread in self._waits

    def waiting(self) -> Waiting | None:
        """Return the main thread's innermost wait for other ranks, or the call it is stuck in."""
        mine = self._waits.get(threading.main_thread().ident or 0)
        return mine[-1] if mine else self.stuck

    def _own_answer(self, about: Iterable[int]) -> dict[str, Any]:
        waiting = self.waiting()
        looks = {rank: self.look_at(rank) for rank in about}
        return {
            **own_state(),
            "leaving": self.is_leaving,
            "waiting": {} if waiting is None else waiting.values(),
            "described": {key: each.describe() for key, each in self.describers.items()},
            "seen": {str(rank): look for rank, look in looks.items() if look is not None},
        }

    # ---------------------------------------------------------------- processes

    def look_at(self, rank: int) -> Look | None:
        """Look at the process of ``rank``; None where this process cannot."""
        process = self.roll.processes.get(rank)
        return process.look() if process is not None and process.is_visible else None

    def has_ended(self, rank: int) -> bool:
        """Tell whether ``rank`` was a process of this host that is known to have ended."""
        process = self.roll.processes.get(rank)
        return process is not None and process.has_ended

    def kill_stopped(self, rank: int) -> bool:
        """Kill ``rank`` if it is a stopped process of this host; tells whether it was."""
        process, look = self.roll.processes.get(rank), self.look_at(rank)
        if process is None or look is None or not look.is_stopped:
            return False
        os.kill(process.pid, signal.SIGKILL)
        return True
