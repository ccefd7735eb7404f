"""The roll of a run: who has come, what each says of itself, and the processes of this host.

Words go up a tree of keys; whoever comes last to a key merges what stands there and carries it on.
Nobody waits on the way, and each rank then waits for one key and reads it::

    rank 0 ─┐
    rank 1 ─┼─> 0/0 ──merged──┐                     a key holds one line for each of its FAN
     ...   ─┘   0/1 ──merged──┼─> 1/0 ──> ... all   children: a table with a column for each field,
    rank W ───> ...           ┘                     which packs well, as neighbors say the same

Processes matter to the ranks of their own host alone, which have a list of theirs.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.comm.failures.board import Board
from meshwright.comm.failures.clock import Arrival
from meshwright.comm.failures.processes import Process

FAN = 16
"""Children of one key of the tree."""

_LONGEST = 1 << 26
"""Bytes that a line may have when it is unpacked: it may be a stranger's."""

_MOST = 1 << 20
"""Ranks of a table, for the same reason."""

Entry = Mapping[str, Any]
"""The words of a rank about itself."""

_Words = dict[int, tuple[bool, Entry]]
"""By rank, whether it hosts the store, and what it says."""


class Roll:
    """The roll as ``rank`` of ``world_size``, in ``process``, writes and reads it."""

    def __init__(self, board: Board, rank: int, world_size: int, process: Process) -> None:
        self.entries: Sequence[Entry] = ()
        """The words of all ranks, in rank order; empty until all have come."""
        self.processes: dict[int, Process] = {rank: process}
        """The processes of this host that have come."""
        self._board, self._rank, self._world_size = board, rank, world_size
        self._process = process
        self.meeting = 0
        """The number of the run among those of this rank on the same store."""
        self._arrival: Arrival | None = None

    def claim(self) -> bool:
        """Take this rank's place in the run; False when it has been taken before."""
        self.meeting = self._board.add(f"roll/count/{self._rank}", 1)
        return self.meeting == 1

    def sign(self, entry: Entry, *, is_hosting: bool) -> None:
        """Tell the others that this rank has come, whether it hosts the store, and ``entry``."""
        if not self.meeting:
            self.claim()
        process = self._process
        self._board.append(
            self._at_host(), f"{self._rank} {process.pid} {process.started} {is_hosting:d}\n"
        )
        text = _packed({self._rank: (is_hosting, entry)})
        level, index, count = 0, self._rank, self._world_size
        while count > 1 or not level:
            key, children = self._key(level, index // FAN), min(FAN, count - index // FAN * FAN)
            self._board.append(key, f"{text}\n")
            if self._board.add(f"{key}/count", 1) < children:
                self._arrival = self._board.arrival(self._all())
                return
            text = _packed(_merged((self._board.get(key) or "").splitlines()))
            level, index, count = level + 1, index // FAN, -(-count // FAN)
        self._board.set(self._all(), text)
        self._read_host()
        self._take(text)

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the others; nothing is asked of the store until all are here."""
        if self._arrival is not None and not self.entries and self._arrival.wait(seconds):
            self._board.run(self.read)

    def read(self) -> None:
        """Take in who has come, as far as two requests of the store tell."""
        if self.entries or self._arrival is None:
            return
        is_complete = self._arrival.has_come  # so is the list of this host then
        self._read_host()
        if is_complete:
            self._take(self._board.get(self._all()) or "")

    def absent(self) -> list[int]:
        """List the ranks that have not come; many requests, so ask only to name them."""
        if self.entries:
            return []
        lines: list[str] = []
        for group in range(-(-self._world_size // FAN)):
            lines.extend((self._board.get(self._key(0, group)) or "").splitlines())
        come = _merged(lines).keys()
        return [rank for rank in range(self._world_size) if rank not in come]

    # ---------------------------------------------------------------- private

    def _read_host(self) -> None:
        for line in (self._board.get(self._at_host()) or "").splitlines():
            rank, *values = (int(word) if word.isdecimal() else -1 for word in line.split())
            if len(values) == 3 and 0 <= rank < self._world_size:
                pid, started, is_hosting = values
                process = Process(place=self._process.place, pid=pid, started=started)
                self.processes.setdefault(rank, process)
                if is_hosting == 1:
                    self._board.learn_host(rank)

    def _take(self, text: str) -> None:
        entries, host = _told(text)
        if len(entries) == self._world_size:
            self.entries = entries
        if host is not None:
            self._board.learn_host(host)

    def _key(self, level: int, group: int) -> str:
        return f"roll/{self.meeting}/{level}/{group}"

    def _all(self) -> str:
        return f"roll/{self.meeting}/all"

    def _at_host(self) -> str:
        place = hashlib.blake2b(self._process.place.encode(), digest_size=8).hexdigest()
        return f"roll/{self.meeting}/at/{place}"


@functools.lru_cache(maxsize=1)  # simulated ranks, thousands in a process, read the same
def _told(text: str) -> tuple[tuple[Entry, ...], int | None]:
    """Read the words of all ranks, as far as they are there from the first on, and who hosts."""
    words = _unpacked(text)
    host = next((rank for rank, (is_hosting, _) in words.items() if is_hosting), None)
    return tuple(words[rank][1] for rank in range(len(words)) if rank in words), host


def _packed(words: _Words) -> str:
    """Pack ``words`` into one line: a table for the ranks that have the same fields."""
    by_fields: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(words):
        by_fields.setdefault(tuple(sorted(words[rank][1])), []).append(rank)
    tables = [
        [
            _pairs(ranks),
            [rank for rank in ranks if words[rank][0]],
            {name: [words[rank][1][name] for rank in ranks] for name in fields},
        ]
        for fields, ranks in by_fields.items()
    ]
    return base64.b85encode(zlib.compress(json.dumps(tables).encode(), 9)).decode()


def _merged(lines: Iterable[str]) -> _Words:
    """Unpack ``lines``, and put them together. What is no such line is left out."""
    found: _Words = {}
    for line in lines:
        found.update(_unpacked(line))
    return found


def _unpacked(line: str) -> _Words:
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(line), _LONGEST)
        words: _Words = {}
        for (*pairs,), (*hosting,), columns in json.loads(data):
            runs = [range(a, b + 1) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
            if sum(map(len, runs)) > _MOST:
                return {}
            ranks = [rank for run in runs for rank in run]
            fields, values = list(columns), list(columns.values())
            rows = zip(*values, strict=True) if fields else ((),) * len(ranks)
            for rank, row in zip(ranks, rows, strict=True):
                words[rank] = rank in hosting, dict(zip(fields, row, strict=True))
    except (ValueError, TypeError, AttributeError, RecursionError, zlib.error):
        return {}
    return words


def _pairs(ranks: Iterable[int]) -> list[int]:
    """List the first and the last of each run of ``ranks``."""
    pairs: list[int] = []
    for rank in ranks:
        if pairs and pairs[-1] == rank - 1:
            pairs[-1] = rank
        else:
            pairs += [rank, rank]
    return pairs
