"""Calls of ranks, as fingerprints that peers compare before any data moves.

Each collective begins with a step in which every rank writes a record: a digest of operation,
shape, dtype, reduction and root, a digest of the label, where its data lies, and the same in words
for the error message. Records that differ raise `CollectiveMismatchError` on every rank.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from array import array
from dataclasses import dataclass, replace

import torch

from meshwright.comm.shared_memory.arena import Location
from meshwright.comm.shared_memory.waits import Meeting
from meshwright.errors import CollectiveMismatchError

DIGEST, LABEL, SOURCE, TARGET, TEXT, NOTES = 0, 1, 2, 6, 10, 64
"""Words of a record: two digests, two locations, length and bytes of the text, a note per rank."""
TEXT_BYTES = 8 * (NOTES - TEXT - 1)

Shape = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Compute a positive number of 62 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective as all ranks must issue it."""

    kind: str
    shape: Shape = ()
    dtype: torch.dtype | None = None
    reduction: str = ""
    root: int | None = None
    """The root's number in the world."""
    label: str = ""
    fingerprint: int = 0
    record: bytes = b""
    """The head of the record, without locations and notes."""

    def complete(self) -> Call:
        """Return this call with its fingerprint and record computed."""
        text = self.describe()
        unlabelled = replace(self, label="").describe()
        fingerprint = digest(unlabelled)
        label = digest(self.label) | 1 if self.label else 0
        data = text.encode()[:TEXT_BYTES]
        head = struct.pack("<2q", fingerprint, label) + bytes(8 * (TEXT - 2))
        record = head + struct.pack("<q", len(data)) + data
        return replace(self, fingerprint=fingerprint, record=record)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Find the call in one phrase."""
        parts = [self.kind]
        if self.reduction:
            parts.append(self.reduction)
        if self.dtype is not None:
            parts.append(f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}")
        if self.root is not None:
            parts.append(f"root rank {self.root}")
        if self.label:
            parts.append(f'"{self.label}"')
        return " ".join(parts)


class Records:
    """The records of all ranks of a group."""

    def __init__(self, meeting: Meeting) -> None:
        layout = meeting.layout
        self._meeting = meeting
        self._words = meeting.segment.words
        self._bytes = meeting.segment.bytes
        self._me = meeting.peers.me
        self._first = tuple(
            tuple(layout.record(rank, parity) for rank in range(layout.size)) for parity in (0, 1)
        )
        self._others = tuple(rank for rank in range(layout.size) if rank != self._me)

    def write(
        self,
        parity: int,
        call: Call,
        source: Location | None = None,
        target: Location | None = None,
    ) -> None:
        """Write what this rank calls; its peers read it when it has arrived at the step."""
        first = self._first[parity][self._me]
        record = call.record
        self._bytes[8 * first : 8 * first + len(record)] = record
        if source is not None:
            self._write_location(first + SOURCE, source)
        if target is not None:
            self._write_location(first + TARGET, target)

    def _write_location(self, word: int, location: Location) -> None:
        words = self._words
        words[word] = location.serial
        words[word + 1] = location.descriptor
        words[word + 2] = location.offset
        words[word + 3] = location.nbytes

    def write_notes(self, parity: int, notes: list[int]) -> None:
        """Write a number for each rank beside the record."""
        first = self._first[parity][self._me] + NOTES
        self._words[first : first + len(notes)] = array("q", notes)

    def notes(self, parity: int, rank: int) -> list[int]:
        """List the numbers that ``rank`` wrote beside its record."""
        first = self._first[parity][rank] + NOTES
        return self._words[first : first + len(self._first[parity])].tolist()

    def source(self, parity: int, rank: int) -> Location | None:
        """Find the place of the input of ``rank``, if its peers can map it."""
        return self._location(self._first[parity][rank] + SOURCE)

    def target(self, parity: int, rank: int) -> Location | None:
        """Find the place of the output of ``rank``, if its peers can map it."""
        return self._location(self._first[parity][rank] + TARGET)

    def _location(self, word: int) -> Location | None:
        words = self._words
        if not words[word]:
            return None
        return Location(words[word], words[word + 1], words[word + 2], words[word + 3])

    def check(self, parity: int, call: Call) -> None:
        """Raise when a rank has called something else in this step."""
        words, firsts = self._words, self._first[parity]
        label = words[firsts[self._me] + LABEL]
        for rank in self._others:
            first = firsts[rank]
            if words[first] != call.fingerprint or (
                words[first + 1] != label and label and words[first + 1]
            ):
                raise CollectiveMismatchError(self._describe(parity))

    def refuse(self, parity: int, reason: str) -> CollectiveMismatchError:
        """Make the error for calls whose fingerprints agree but whose sizes do not."""
        return CollectiveMismatchError(f"{reason}; {self._describe(parity)}")

    def _describe(self, parity: int) -> str:
        """Describe the calls, ranks with the same call together."""
        numbers = self._meeting.peers.ranks
        by_text: dict[str, list[int]] = {}
        for rank, first in enumerate(self._first[parity]):
            start = 8 * (first + TEXT) + 8
            length = min(self._words[first + TEXT], TEXT_BYTES)
            text = bytes(self._bytes[start : start + length]).decode(errors="replace")
            by_text.setdefault(text, []).append(numbers[rank])
        groups = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} called {text}"
            for text, ranks in by_text.items()
        )
        return f"the ranks differ at step {self._meeting.step} of their group: {groups}"
