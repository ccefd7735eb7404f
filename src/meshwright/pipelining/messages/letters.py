"""Letters: headers sent ahead of payloads, as JSON over the control channel.

Two ranks write and read each other's letters in the order of the payloads. A letter has a fixed
size, so that its receive can be posted before its contents are known; what does not fit follows in
a second message.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm import Communicator, Pending

Contents = dict[str, Any]
Sent = list[tuple[Pending, torch.Tensor]]
"""Sends in flight, each with the memory that it reads from."""

ROOM = 512
"""Bytes in a letter."""
_COUNT = 8
"""Bytes at its start that hold the length of the text."""


@dataclass(slots=True, eq=False)
class Letter:
    """A letter from rank ``rank`` that is awaited or has arrived."""

    rank: int
    label: str
    pending: Pending
    buffer: torch.Tensor
    contents: Contents | None = None
    """None until it is read."""

    @property
    def has_come(self) -> bool:
        """True when reading it waits for nothing."""
        return self.contents is not None or self.pending.is_completed()

    def open(self, receive: Callable[[torch.Tensor], None], watch: Callable[[], None]) -> None:
        """Wait for it; ``receive`` fills a buffer with what did not fit."""
        self.pending.wait(watch=watch)
        first = bytes(self.buffer.numpy())
        count = int.from_bytes(first[:_COUNT], "little")
        text = first[_COUNT : _COUNT + count]
        if len(text) < count:
            rest = torch.empty(count - len(text), dtype=torch.uint8, device="cpu")
            receive(rest)
            text += bytes(rest.numpy())
        self.contents = json.loads(text)


class Letters:
    """The letters of one schedule on one rank."""

    def __init__(self, communicator: Communicator, number: int) -> None:
        self._control = communicator.control
        self._tags = 2 * number, 2 * number + 1
        """Tags of letters and of what did not fit in them; other schedules have other tags."""
        self._unread: dict[int, deque[Letter]] = {}
        """By rank, oldest first."""
        self._awaited: dict[int, Letter] = {}
        """By rank, the letter that all else waits for. If a refused step leaves one, the next step
        takes it over: a posted receive cannot be withdrawn."""

    def send(self, contents: Contents, rank: int, label: str) -> Sent:
        """Send ``contents`` to ``rank``; returns the sends in flight."""
        text = json.dumps(contents).encode()
        whole = len(text).to_bytes(_COUNT, "little") + text
        sent = [self._send(whole[:ROOM].ljust(ROOM), rank, self._tags[0], label)]
        if len(whole) > ROOM:
            sent.append(self._send(whole[ROOM:], rank, self._tags[1], f"rest: {label}"))
        return sent

    def _send(self, part: bytes, rank: int, tag: int, label: str) -> tuple[Pending, torch.Tensor]:
        message = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        return self._control.send(message, rank, tag=tag, label=label), message

    def expect(self, rank: int, label: str) -> Letter:
        """Post the receive of the next letter from ``rank``."""
        buffer = torch.empty(ROOM, dtype=torch.uint8, device="cpu")
        pending = self._control.recv(buffer, rank, tag=self._tags[0], label=label)
        letter = Letter(rank, label, pending, buffer)
        self._unread.setdefault(rank, deque()).append(letter)
        return letter

    def awaited(self, rank: int, label: str) -> Letter:
        """Expect a letter that must be read first: the same one until it is `accepted`."""
        found = self._awaited.get(rank)
        if found is None:
            found = self._awaited[rank] = self.expect(rank, label)
        return found

    def accept(self, letter: Letter) -> None:
        """Release an `awaited` letter that was read for this step, so that the next is expected."""
        del self._awaited[letter.rank]

    def read(self, letter: Letter, watch: Callable[[], None]) -> Contents:
        """Wait for a letter, and for those before it; ``watch`` is called meanwhile."""
        unread = self._unread.get(letter.rank)
        while unread and letter.contents is None:
            oldest = unread[0]

            def receive(rest: torch.Tensor, oldest: Letter = oldest) -> None:
                tag, label = self._tags[1], f"rest: {oldest.label}"
                self._control.recv(rest, oldest.rank, tag=tag, label=label).wait(watch=watch)

            oldest.open(receive, watch)
            unread.popleft()
        return letter.contents or {}
