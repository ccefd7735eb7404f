"""Fingerprints of calls, which peers compare before any data moves.

Each collective begins with a step in which every rank writes a record: a digest of operation,
shape, dtype, reduction and root, a digest of the label, the location of its data, and a description
for the error message. Calls that differ raise `CollectiveMismatchError` on every rank.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, replace

from meshwright.comm.c10d.calls import Call, digest
from meshwright.comm.failures.sameness import sides
from meshwright.comm.shared_memory.arena import Location
from meshwright.comm.shared_memory.waits import Meeting
from meshwright.errors import CollectiveMismatchError

DIGEST, LABEL, SOURCE, TEXT, NOTES = 0, 1, 2, 6, 64
"""Words of a record: two digests, a location, length and bytes of the text, a note per rank."""
TEXT_BYTES = 8 * (NOTES - TEXT - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall(Call):
    """A call with its fingerprint, and the start of its record, without location and notes."""

    fingerprint: int = 0
    record: bytes = b""

    def complete(self) -> RecordedCall:
        """Return this call with its fingerprint and record computed."""
        fingerprint, label = digest(self.form), digest(self.label) | 1 if self.label else 0
        data = str(self).encode()[:TEXT_BYTES]
        # Zeros for the location: they clear that of the step that used this record before.
        head = struct.pack("<2q", fingerprint, label) + bytes(8 * (TEXT - 2))
        record = head + struct.pack("<q", len(data)) + data
        return replace(self, fingerprint=fingerprint, record=record)


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
        self.threads: set[str] = set()
        """The names of the threads that have issued calls of the group on this rank."""

    def write(self, parity: int, call: RecordedCall, source: Location | None = None) -> None:
        """Write this rank's call; its peers read it when it has arrived at the step."""
        first = self._first[parity][self._me]
        record = call.record
        self._bytes[8 * first : 8 * first + len(record)] = record
        if source is not None:
            words, word = self._words, first + SOURCE
            words[word] = source.serial
            words[word + 1] = source.descriptor
            words[word + 2] = source.offset
            words[word + 3] = source.nbytes

    def write_notes(self, parity: int, notes: list[int]) -> None:
        first = self._first[parity][self._me] + NOTES
        self._words[first : first + len(notes)] = array("q", notes)

    def notes(self, parity: int, rank: int) -> list[int]:
        first = self._first[parity][rank] + NOTES
        return self._words[first : first + len(self._first[parity])].tolist()

    def source(self, parity: int, rank: int) -> Location | None:
        """Return the location of the input of ``rank``, if its peers can map it."""
        words, word = self._words, self._first[parity][rank] + SOURCE
        if not words[word]:  # serial numbers begin at 1
            return None
        return Location(words[word], words[word + 1], words[word + 2], words[word + 3])

    def check(self, parity: int, call: RecordedCall) -> None:
        """Raise when a rank has made another call in this step."""
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
        numbers = self._meeting.peers.ranks
        texts: list[str] = []
        for first in self._first[parity]:
            start = 8 * (first + TEXT) + 8
            length = min(self._words[first + TEXT], TEXT_BYTES)
            texts.append(bytes(self._bytes[start : start + length]).decode(errors="replace"))
        groups = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} called {text}"
            for text, ranks in sides(numbers, texts).items()
        )
        text = f"the ranks differ at step {self._meeting.step} of their group: {groups}"
        if len(self.threads) > 1:
            text += (
                f". Threads of rank {numbers[self._me]} issue calls of the group beside each "
                f"other ({', '.join(sorted(self.threads))}), in an order that other ranks need "
                "not have: give each thread a group of its own, as dcp.async_save takes by "
                "process_group=torch.distributed.new_group()"
            )
        return text
