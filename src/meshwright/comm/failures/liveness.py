"""Liveness of ranks: sign-in, roll calls, and inspection of processes that do not answer.

A rank signs in with its process and its entry. From then on its board's thread answers roll calls,
also while the main thread computes or waits. The ranks of its host inspect its process if it cannot
answer. The last rank to sign in reads all entries and stores them under one key, which each rank
waits for and reads once::

    rank 0   ──entry──> roll/1/0   ─┐
     ...                            ├─ by the last to sign in ──> roll/1/all ──> every rank
    rank W   ──entry──> roll/1/W   ─┘

Processes matter only to the ranks of their own host, which keep a separate list.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from meshwright.comm.failures.processes import Look, Process
from meshwright.comm.failures.status import answer_of, own_state
from meshwright.comm.failures.store import Gathering, KeyWait, StoreClient

PATIENCE = 2.0
"""Seconds within which a rank that can answer a roll call does so, given a core to run on."""

LISTED = 64
"""Ranks of a group that an answer names one by one."""

KEPT = 4
"""Roll calls whose answers stay on the board, of those that a rank has read."""

CONTROL = " (control)"
"""The suffix of a control channel's name, after the name of its group."""

_LONGEST = 1 << 26
"""Bytes to unpack at most for the entries of all ranks: other programs may write to the store."""

Entry = Mapping[str, Any]
"""The values that a rank publishes about itself when it signs in."""

Answers = Mapping[int, Mapping[str, Any]]
"""The answers of ranks, by rank; those that have not answered are missing."""


class Describer(Protocol):
    """Adds to this rank's status. Called from the board's thread."""

    def describe(self) -> Mapping[str, Any]:
        """Return values that JSON can represent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The ranks that a wait needs, so that each rank can tell which have not done their part.

    A rank has done its part when it waits at the same ``place``, or has counted past ``number``
    under ``key`` of ``channel``.
    """

    ranks: Sequence[int] | None = ()
    """The world's numbers of the ranks; None for all that have the channel, where that are many."""
    channel: str = ""
    key: str = ""
    number: int = 0
    place: str = ""

    @staticmethod
    def listed(ranks: Sequence[int]) -> Sequence[int] | None:
        """List ``ranks``, unless that would make each answer of a large world too long."""
        return ranks if len(ranks) <= LISTED else None


NOBODY = Need()
"""The need of a wait about which nothing is known but that this rank waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait of this rank, as other ranks see it."""

    what: str
    number: int
    """Different in every wait of this rank."""
    need: Callable[[], Need] = lambda: NOBODY
    """Tells, whenever it is asked, whom the wait needs."""

    def values(self) -> dict[str, Any]:
        """Return the JSON values that other ranks see."""
        return {"what": self.what, "number": self.number, "need": asdict(self.need())}


class Liveness:
    """The ranks of the run as seen by this one, ``rank`` in ``process``."""

    def __init__(self, board: StoreClient, rank: int, world_size: int, process: Process) -> None:
        self.rank = rank
        self.world_size = world_size
        self.entries: Sequence[Entry] = ()
        """The entries of all ranks, in rank order; empty until all have signed in."""
        self.processes: dict[int, Process] = {rank: process}
        """The processes of this host that have signed in, by rank."""
        self.run = 0
        """The number of this run among those of this rank on the same store; 0 before `claim`."""
        self._arrival: KeyWait | None = None
        """The wait for the last rank; None on the last, and before this one has signed in."""
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
        """The barrier at the end of the run, where all ranks arrive."""
        return Gathering(self._board, f"end/{self.run}", self.world_size)

    @functools.cached_property
    def gone(self) -> Gathering:
        """The second barrier, where each rank has seen that all have arrived at the end."""
        return Gathering(self._board, f"gone/{self.run}", self.world_size)

    # ---------------------------------------------------------------- coming and leaving

    def claim(self) -> bool:
        """Claim this rank's place in the run; False when it was claimed before."""
        self.run = self._board.add(f"roll/count/{self.rank}", 1)
        return self.run == 1

    def sign_in(self, entry: Entry, *, is_hosting: bool) -> None:
        """Announce this rank with its ``entry``, and whether it hosts the store."""
        if not self.run:
            self.claim()
        board, process = self._board, self.processes[self.rank]
        board.append(
            self._at_host(), f"{self.rank} {process.pid} {process.started} {is_hosting:d}\n"
        )
        board.set(self._at(self.rank), json.dumps([is_hosting, entry]))
        if board.add(self._at("count"), 1) < self.world_size:
            self._arrival = board.arrival(self._at("all"))
            return
        words = board.multi_get([self._at(rank) for rank in range(self.world_size)])
        data = zlib.compress(f"[{','.join(words)}]".encode(), 9)
        board.set(self._at("all"), text := base64.b85encode(data).decode())
        self._read_host()
        self._take(text)

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the others; sends no request until all are here."""
        if self._arrival is not None and not self.entries and self._arrival.wait(seconds):
            self._board.run(self.read)

    def read(self) -> None:
        """Update who has signed in, as far as two requests of the store tell."""
        if self.entries or self._arrival is None:
            return
        is_complete = self._arrival.has_come  # so is the list of this host then
        self._read_host()
        if is_complete:
            self._take(self._board.get(self._at("all")) or "")

    def absent(self) -> list[int]:
        """List the ranks that have not signed in; one request each, so only to name them."""
        ranks = () if self.entries else range(self.world_size)
        return [rank for rank in ranks if not self._board.check([self._at(rank)])]

    def _read_host(self) -> None:
        place = self.processes[self.rank].place
        for line in (self._board.get(self._at_host()) or "").splitlines():
            rank, *values = (int(word) if word.isdecimal() else -1 for word in line.split())
            if len(values) == 3 and 0 <= rank < self.world_size:
                pid, started, is_hosting = values
                self.processes.setdefault(rank, Process(place=place, pid=pid, started=started))
                if is_hosting == 1:
                    self._board.host = rank

    def _take(self, text: str) -> None:
        """Store the entries of all ranks from ``text``, if it has them."""
        words = _words_of(text)
        if len(words) != self.world_size:
            return
        self.entries = [entry for _, entry in words]
        host = next((rank for rank, (is_hosting, _) in enumerate(words) if is_hosting), None)
        if host is not None:
            self._board.host = host

    def _at(self, what: int | str) -> str:
        return f"roll/{self.run}/{what}"

    def _at_host(self) -> str:
        place = self.processes[self.rank].place.encode()
        return self._at(f"at/{hashlib.blake2b(place, digest_size=8).hexdigest()}")

    def leave(self) -> None:
        """Tell the others that this rank is done."""
        if self.is_leaving:
            return
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
        """Wait at most ``patience`` seconds for the answers to the roll call in ``slot``."""
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
        """Answer the roll call in ``slot``, after inspecting the processes of ranks ``about``."""
        text = json.dumps(self._own_answer(about))
        self._board.append(self._answers(slot), f"{self.rank} {text}\n")

    def _answers(self, slot: int) -> str:
        return f"answers/{self.run}/{slot}"

    # ---------------------------------------------------------------- waits of this rank

    def begin_wait(self, what: str, need: Callable[[], Need]) -> int:
        """Record that this thread waits for other ranks, to `end_wait`; returns the number."""
        self._wait_count += 1
        waiting = Waiting(what=what, number=self._wait_count, need=need)
        self._waits.setdefault(threading.get_ident(), []).append(waiting)
        return waiting.number

    def end_wait(self) -> None:
        """Record that the innermost wait of this thread is over."""
        mine = self._waits[threading.get_ident()]
        mine.pop()
        if not mine:
            del self._waits[threading.get_ident()]

    def is_watched(self, thread: int) -> bool:
        """Whether ``thread`` is in a bounded wait, which ends by itself."""
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
        """Inspect the process of ``rank``; None if this process cannot."""
        process = self.processes.get(rank)
        return process.look() if process is not None and process.is_visible else None

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` was a process of this host that is known to have ended."""
        process = self.processes.get(rank)
        return process is not None and process.has_ended


@functools.lru_cache(maxsize=1)  # simulated ranks, thousands in a process, read the same
def _words_of(text: str) -> Sequence[tuple[bool, Entry]]:
    """Unpack the entries of all ranks, and who hosts the store; empty for any other ``text``."""
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(text), _LONGEST)
        return [(bool(is_hosting), dict(entry)) for is_hosting, entry in json.loads(data)]
    except (ValueError, TypeError, RecursionError, zlib.error):
        return ()
