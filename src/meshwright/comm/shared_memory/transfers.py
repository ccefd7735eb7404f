"""Point-to-point messages between ranks that share memory.

Each ordered pair of ranks has a channel: a ring of entries, one for each message, and a stream of
blocks. A small message is in its entry, and its send has ended when it is posted. The entry of a
large message only describes it; its bytes flow through the stream once the receiver has found the
matching receive. So receives may be posted in any order, from any source.

::

    sender:    post an entry ................. wait for the grant, fill blocks ..... ended
    receiver:  take entries in order, match .. grant the message, drain blocks ..... ended
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from meshwright.comm.c10d.calls import digest
from meshwright.comm.shared_memory.buffers import contiguous, writable
from meshwright.comm.shared_memory.queue import Background, SharedWork
from meshwright.comm.shared_memory.waits import LEFT, Meeting, unusable
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
)

ANY_SOURCE = -1
CHECK_EVERY = 0.1
"""Seconds between two checks of the peers' processes by the background thread."""
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
        """The sender's call, in words."""
        return self.words.decode(errors="replace")


@functools.lru_cache(maxsize=64)
def dtype_digest(dtype: torch.dtype) -> int:
    return digest(str(dtype))


@functools.lru_cache(maxsize=1024)
def _described(kind: str, dtype: torch.dtype, shape: tuple[int, ...], tag: int, label: str) -> str:
    label = f' "{label}"' if label else ""
    return f"{kind} {str(dtype).removeprefix('torch.')}{list(shape)} tag {tag}{label}"


class ChannelTransfer(SharedWork):
    """A send or a receive under way, moved by the engine of its group."""

    def __init__(
        self,
        owner: Transfers,
        kind: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        label: str,
    ) -> None:
        super().__init__([tensor])
        self.owner = owner
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.label = label
        self.buffer = (contiguous if kind == "send" else writable)(tensor)
        self.address = self.buffer.data_ptr()
        self.nbytes = self.buffer.nbytes
        self.limit = time.monotonic() + owner.meeting.timeout
        """The time of the monotonic clock at which it fails."""
        self.source = -1
        """The rank of the group that the message came from."""

    def __str__(self) -> str:
        tensor = self.outputs[0]
        return _described(self.kind, tensor.dtype, tensor.shape, self.tag, self.label)

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        return self.source

    def take(self, message: TakenMessage, address: int | None) -> bool:
        """Take the bytes of ``message``, from ``address`` if it is still in its entry.

        False for a large one, whose bytes the stream will bring.
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
        """Mark the transfer as ended; a strided receive is filled now."""
        if error is None and self.kind == "recv" and self.buffer is not self.outputs[0]:
            with torch.no_grad():
                self.outputs[0].data.copy_(self.buffer)
        super().finish(error)

    def is_completed(self) -> bool:
        """Check whether it has ended; also looks for its message, for programs that only poll."""
        if not self.done:
            self.owner.look()
        return self.done

    def _drive(self, until: float) -> bool:
        return self.owner.drive(self, until)

    def _late(self, seconds: float) -> str:
        return self.owner.late(self, seconds)


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
        """Free the entry of the message that was taken; True if the sender may wait for it."""
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
        """Copy the blocks that have arrived; returns the ended receives, None if no block had."""
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


class Transfers:
    """The sends and receives of a group. They never wait behind a collective."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        me, size = meeting.peers.me, meeting.layout.size
        self.meeting = meeting
        self._lock = threading.Lock()
        self._outboxes = [Outbox(Channel(meeting, me, peer)) for peer in range(size)]
        self._inboxes = [Inbox(Channel(meeting, peer, me), peer) for peer in range(size)]
        self._receives: list[ChannelTransfer] = []
        self._unexpected: list[TakenMessage] = []
        self._open: list[ChannelTransfer] = []
        self._checked = 0.0
        self._rings = 0
        self._drivers = 0
        self._ended: deque[ChannelTransfer] = deque()
        self._background = Background(
            name, lambda: bool(self._open), self._look_behind, self._break
        )

    def send(self, tensor: torch.Tensor, peer: int, tag: int, label: str) -> SharedWork:
        return self._begin(ChannelTransfer(self, "send", tensor, peer, tag, label))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, label: str) -> SharedWork:
        """Receive into ``tensor`` from rank ``peer`` of the group, or from `ANY_SOURCE`."""
        return self._begin(ChannelTransfer(self, "recv", tensor, peer, tag, label))

    def close(self) -> None:
        self._background.close()

    def look(self) -> bool:
        """Move data that can be moved without waiting; returns whether there was any."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._move()
        finally:
            self._lock.release()
            self._announce()

    def drive(self, transfer: ChannelTransfer, until: float) -> bool:
        """Move messages until ``transfer`` has ended; False when ``until`` comes first."""
        meeting = self.meeting
        with self._lock:
            self._drivers += 1
        try:
            while not transfer.done:
                heard = meeting.doorbell()
                with self._lock:
                    moved = self._move()
                self._announce()
                if moved or transfer.done:
                    continue
                now = time.monotonic()
                if now >= until:
                    return False
                meeting.listen(heard, max(1e-6, min(until, transfer.limit) - now))
                self._check(transfer)
            return True
        finally:
            with self._lock:
                self._drivers -= 1

    # ------------------------------------------------------------------ steps

    def _begin(self, transfer: ChannelTransfer) -> SharedWork:
        meeting = self.meeting
        if meeting.broken is not None:
            raise unusable(meeting.broken)
        with self._lock:
            self._open.append(transfer)
            if transfer.kind == "send":
                outbox = self._outboxes[transfer.peer]
                outbox.waiting.append(transfer)
                self._push(transfer.peer, outbox)
            else:
                self._receives.append(transfer)
                self._move()
        self._announce()
        if not transfer.done:
            self._background.call(urgent=False)
        elif transfer.error is not None:
            raise transfer.error
        return transfer

    def _announce(self) -> None:
        while self._ended:
            try:
                transfer = self._ended.popleft()
            except IndexError:
                return
            transfer.announce()

    def _look_behind(self) -> bool:
        """Poll once, in the background thread; returns whether anything has moved."""
        if self._drivers:
            return False
        if self.look():
            return True
        now = time.monotonic()
        if now >= self._checked:
            self._checked = now + CHECK_EVERY
            for transfer in list(self._open):
                self._check(transfer)
        return False

    def _check(self, transfer: ChannelTransfer) -> None:
        """Fail all transfers when the peer of ``transfer`` is gone or its timeout has passed."""
        if transfer.done:
            return
        meeting = self.meeting
        try:
            meeting.check(transfer, self._awaited(transfer))
            if time.monotonic() < transfer.limit:
                return
            raise CollectiveTimeoutError(self.late(transfer, meeting.timeout))
        except CommunicationError as error:
            with self._lock:
                # What the peer posted before it left is still there to be taken.
                if not self._move() and not transfer.done:
                    self._fail(error)
        self._announce()

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._fail(error)
        self._announce()

    def _awaited(self, transfer: ChannelTransfer) -> list[int]:
        if transfer.peer != ANY_SOURCE:
            return [transfer.peer]
        meeting = self.meeting
        others = [rank for rank in range(meeting.layout.size) if rank != meeting.peers.me]
        return [rank for rank in others if meeting.state(rank) != LEFT] or others

    def late(self, transfer: ChannelTransfer, seconds: float) -> str:
        peers = self.meeting.peers
        names = ", ".join(peers.name(rank) for rank in self._awaited(transfer))
        held = "; ".join(
            f"rank {peers.ranks[message.source]} has sent {message.text}"
            for message in self._unexpected[:4]
        )
        direction = "to" if transfer.kind == "send" else "from"
        return (
            f"{transfer} {direction} {names} has not ended after {seconds:.3g} s"
            f"{'; messages that nothing has asked for: ' + held if held else ''}"
        )

    # ------------------------------------------------------------------ with the lock held

    def _end(self, transfer: ChannelTransfer, error: BaseException | None = None) -> None:
        transfer.finish(error)
        self._open.remove(transfer)
        self._ended.append(transfer)

    def _fail(self, error: BaseException) -> None:
        self.meeting.break_with(error)
        for transfer in list(self._open):
            self._end(transfer, error)

    def _move(self) -> bool:
        """Advance all transfers as far as possible; returns whether anything has moved."""
        moved = False
        try:
            for peer, outbox in enumerate(self._outboxes):
                if outbox.waiting or outbox.posted:
                    moved = self._push(peer, outbox) or moved
            for inbox in self._inboxes:
                moved = self._pull(inbox) or moved
            if self._receives and self._unexpected:
                moved = self._claim() or moved
        except CollectiveMismatchError as error:
            self._fail(error)
            return True
        return moved

    def _ring(self, peer: int) -> None:
        self._rings += 1
        self.meeting.ring(peer, self._rings)

    def _push(self, peer: int, outbox: Outbox) -> bool:
        ended = outbox.move()
        if ended is None:
            return False
        self._ring(peer)
        for send in ended:
            self._end(send)
        return True

    def _pull(self, inbox: Inbox) -> bool:
        moved = False
        while (found := inbox.take()) is not None:
            message, address = found
            receive = self._receive_for(message)
            if receive is not None:
                self._receives.remove(receive)
                self._deliver(message, receive, address)
            else:
                if message.nbytes <= EAGER_BYTES:
                    # Copied out: `release` gives the entry back to the sender.
                    message.data = ctypes.string_at(address, message.nbytes)
                self._unexpected.append(message)
            if inbox.release():
                self._ring(inbox.source)
            moved = True
        if inbox.granted and (ended := inbox.drain()) is not None:
            self._ring(inbox.source)
            for receive in ended:
                self._end(receive)
            moved = True
        return moved

    def _receive_for(self, message: TakenMessage) -> ChannelTransfer | None:
        # Messages of one source and tag stay in order: an earlier one is still unclaimed.
        if self._unexpected and any(
            held.source == message.source and held.tag == message.tag for held in self._unexpected
        ):
            return None
        for receive in self._receives:
            if _fits(receive, message):
                return receive
        return None

    def _claim(self) -> bool:
        """Match messages that arrived before their receives, both in order."""
        moved = False
        for receive in list(self._receives):
            for message in self._unexpected:
                if _fits(receive, message):
                    self._unexpected.remove(message)
                    self._receives.remove(receive)
                    self._deliver(message, receive, None)
                    moved = True
                    break
        return moved

    def _deliver(
        self, message: TakenMessage, receive: ChannelTransfer, address: int | None
    ) -> None:
        numbers, dtype = self.meeting.peers.ranks, receive.buffer.dtype
        if message.nbytes != receive.nbytes or message.dtype != dtype_digest(dtype):
            self._end(
                receive,
                error := CollectiveMismatchError(
                    f"rank {numbers[message.source]} called {message.text} and "
                    f"rank {numbers[self.meeting.peers.me]} called {receive} for it"
                ),
            )
            raise error
        if receive.take(message, address):
            self._end(receive)
        else:
            self._inboxes[message.source].grant(receive, message)
            self._ring(message.source)


def _fits(receive: ChannelTransfer, message: TakenMessage) -> bool:
    return receive.tag == message.tag and receive.peer in (ANY_SOURCE, message.source)
