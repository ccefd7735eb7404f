"""The channels through which one rank's messages reach another, and this rank's ends of them.

A channel is a ring of entries, one for each message, and a stream of blocks. A small message lies
in its entry. Of a large one the entry says only what it is; its bytes flow through the stream once
the receiver has granted it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections import deque
from dataclasses import dataclass

import torch

from meshwright.comm.c10d.calls import digest
from meshwright.comm.shared_memory.queue import SharedWork
from meshwright.comm.shared_memory.waits import Meeting

ENTRIES = 32
EAGER_BYTES = 16 << 10
"""Messages up to this size lie in their entry."""
BLOCKS = 4
BLOCK_BYTES = 256 << 10
HEAD_BYTES = 256
HEAD = struct.Struct("<5q")
"""Words of an entry, then its text: tag, size, dtype, label, length of text."""
TEXT_BYTES = HEAD_BYTES - HEAD.size
_ENTRY = HEAD_BYTES + EAGER_BYTES
_COUNTS = 4096
CHANNEL_BYTES = -(-(_COUNTS + ENTRIES * _ENTRY) // 4096) * 4096 + BLOCKS * BLOCK_BYTES
"""Bytes of one channel. Untouched pages take no memory."""

POSTED, TAKEN, GRANTED, FILLED, DRAINED = 0, 16, 32, 48, 64
"""Words of a channel. The sender writes posted and filled, the receiver the others."""

_copy = ctypes.memmove


@dataclass(slots=True)
class TakenMessage:
    """A message that the receiver has taken from the ring and not yet delivered."""

    number: int
    source: int
    tag: int
    nbytes: int
    dtype: int
    label: int
    words: bytes
    """The sender's call in words."""
    data: bytes | None
    """The bytes of a small message that no receive has asked for yet."""

    @property
    def text(self) -> str:
        """The call of the sender, in words."""
        return self.words.decode(errors="replace")

    def keep(self, address: int) -> None:
        """Keep the bytes of a small message, which lie at ``address`` until its entry is free."""
        self.data = ctypes.string_at(address, self.nbytes)


@functools.lru_cache(maxsize=64)
def dtype_digest(dtype: torch.dtype) -> int:
    """Compute the digest of a dtype's name."""
    return digest(str(dtype))


@functools.lru_cache(maxsize=1024)
def _described(kind: str, dtype: torch.dtype, shape: tuple[int, ...], tag: int, label: str) -> str:
    label = f' "{label}"' if label else ""
    return f"{kind} {str(dtype).removeprefix('torch.')}{list(shape)} tag {tag}{label}"


class ChannelTransfer(SharedWork):
    """A send or a receive under way."""

    def __init__(
        self, kind: str, tensor: torch.Tensor, peer: int, tag: int, label: str, limit: float
    ) -> None:
        """``limit`` is the time of the monotonic clock at which it fails."""
        super().__init__([tensor])
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.label = label
        self.buffer = _plain(tensor, filled=kind == "send")
        self.address = self.buffer.data_ptr()
        self.nbytes = self.buffer.nbytes
        self.limit = limit
        self.source = -1

    def __str__(self) -> str:
        tensor = self.outputs[0]
        return _described(self.kind, tensor.dtype, tensor.shape, self.tag, self.label)

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """Find the rank of the group that the message came from."""
        return self.source

    def take(self, message: TakenMessage, address: int | None) -> bool:
        """Take the bytes of ``message``, from ``address`` where it still lies in its entry.

        False for a large one, whose bytes the stream is to bring.
        """
        self.source = message.source
        if message.nbytes > EAGER_BYTES:
            return False
        if address is not None:
            _copy(self.address, address, message.nbytes)
        elif message.data:
            _copy(self.address, message.data, message.nbytes)
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as ended; a strided receive gets its elements now."""
        if error is None and self.kind == "recv" and self.address != self.outputs[0].data_ptr():
            with torch.no_grad():
                self.outputs[0].data.copy_(self.buffer)
        super().finish(error)


def _plain(tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
    """Return ``tensor`` itself where it is contiguous, otherwise a buffer of its shape."""
    tensor = tensor.data
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if filled:
        return tensor.resolve_conj().resolve_neg().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class Channel:
    """One direction between two ranks."""

    def __init__(self, meeting: Meeting, source: int, target: int) -> None:
        start = meeting.layout.channel(source, target)
        self.words = meeting.segment.words[start // 8 : start // 8 + _COUNTS // 8]
        self.bytes = meeting.segment.bytes[start : start + CHANNEL_BYTES]
        self.address = meeting.segment.address + start

    def entry(self, number: int) -> int:
        """First byte of the entry of message ``number``."""
        return _COUNTS + number % ENTRIES * _ENTRY

    def block(self, number: int) -> int:
        """Address of block ``number`` of the stream."""
        return self.address + CHANNEL_BYTES - (BLOCKS - number % BLOCKS) * BLOCK_BYTES


class Outbox:
    """The sends of this rank to one peer."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.waiting: deque[ChannelTransfer] = deque()
        """Not posted yet, because the ring was full."""
        self.posted: dict[int, ChannelTransfer] = {}
        """Large messages by number, waiting for their grant."""
        self._count = 0
        """Messages posted."""
        self._blocks = 0
        """Blocks filled."""
        self._moved = 0
        """Bytes in the stream of the message that was granted last."""

    def move(self) -> list[ChannelTransfer] | None:
        """Advance the sends; returns those that have ended, or None when nothing has moved."""
        channel, words = self.channel, self.channel.words
        ended: list[ChannelTransfer] = []
        moved = False
        while self.waiting and self._count - words[TAKEN] < ENTRIES:
            send = self.waiting.popleft()
            self._post(send)
            moved = True
            if send.nbytes <= EAGER_BYTES:
                ended.append(send)
        number = words[GRANTED] - 1
        granted = self.posted.get(number)
        while granted is not None and self._blocks - words[DRAINED] < BLOCKS:
            moved = True
            left = granted.nbytes - self._moved
            count = min(BLOCK_BYTES, left)
            _copy(channel.block(self._blocks), granted.address + self._moved, count)
            self._moved += count
            self._blocks += 1
            words[FILLED] = self._blocks
            if count == left:
                self._moved = 0
                del self.posted[number]
                ended.append(granted)
                break
        return ended if moved else None

    def _post(self, send: ChannelTransfer) -> None:
        channel = self.channel
        start = channel.entry(self._count)
        text = str(send).encode()[:TEXT_BYTES]
        label = digest(send.label) if send.label else 0
        kind = dtype_digest(send.buffer.dtype)
        HEAD.pack_into(channel.bytes, start, send.tag, send.nbytes, kind, label, len(text))
        channel.bytes[start + HEAD.size : start + HEAD.size + len(text)] = text
        if send.nbytes <= EAGER_BYTES:
            _copy(channel.address + start + HEAD_BYTES, send.address, send.nbytes)
        else:
            self.posted[self._count] = send
        self._count += 1
        # Last: x86 keeps the order of stores, so who sees the count sees the whole entry.
        channel.words[POSTED] = self._count


class Inbox:
    """The messages of one peer to this rank."""

    def __init__(self, channel: Channel, source: int) -> None:
        self.channel = channel
        self.source = source
        self.granted: deque[tuple[int, ChannelTransfer]] = deque()
        """Receives of large messages, with the numbers of these; the first one has the stream."""
        self._count = 0
        """Messages taken."""
        self._blocks = 0
        """Blocks drained."""
        self._moved = 0
        """Bytes of the first of ``granted`` that were drained."""

    def take(self) -> tuple[TakenMessage, int] | None:
        """Return the next message of the ring, and its address, which is valid until `release`."""
        channel = self.channel
        if channel.words[POSTED] <= self._count:
            return None
        start = channel.entry(self._count)
        tag, nbytes, kind, label, length = HEAD.unpack_from(channel.bytes, start)
        first = start + HEAD.size
        words = bytes(channel.bytes[first : first + min(length, TEXT_BYTES)])
        message = TakenMessage(self._count, self.source, tag, nbytes, kind, label, words, None)
        return message, channel.address + start + HEAD_BYTES

    def release(self) -> bool:
        """Free the entry of the message that was taken; True where the sender may wait for it."""
        words = self.channel.words
        was_full = words[POSTED] - self._count >= ENTRIES
        self._count += 1
        words[TAKEN] = self._count
        return was_full

    def grant(self, receive: ChannelTransfer, message: TakenMessage) -> None:
        """Allow the sender to fill the stream with ``message``, after those granted before."""
        self.granted.append((message.number, receive))
        if len(self.granted) == 1:
            self.channel.words[GRANTED] = message.number + 1

    def drain(self) -> list[ChannelTransfer] | None:
        """Copy the blocks that are there; returns receives that have ended, None if none is."""
        channel, words = self.channel, self.channel.words
        ended: list[ChannelTransfer] = []
        moved = False
        while self.granted and words[FILLED] > self._blocks:
            moved = True
            _, receive = self.granted[0]
            count = min(BLOCK_BYTES, receive.nbytes - self._moved)
            _copy(receive.address + self._moved, channel.block(self._blocks), count)
            self._moved += count
            self._blocks += 1
            words[DRAINED] = self._blocks
            if self._moved == receive.nbytes:
                self._moved = 0
                ended.append(receive)
                self.granted.popleft()
                if self.granted:
                    words[GRANTED] = self.granted[0][0] + 1
        return ended if moved else None
