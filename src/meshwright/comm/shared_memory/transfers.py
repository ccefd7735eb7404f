"""Point-to-point messages between ranks that share memory.

Each ordered pair of ranks has a channel: a ring of entries, one for each message, and a stream of
blocks. A small message lies in its entry, and its send has ended when it is posted. Of a large one
the entry says only what it is; its bytes flow through the stream when the receiver has found the
receive that it belongs to. So receives may be posted in any order, from any source.

::

    sender:    post an entry ................. wait for the grant, fill blocks ..... ended
    receiver:  take entries in order, match .. grant the message, drain blocks ..... ended
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from meshwright.comm.shared_memory.channels import (
    EAGER_BYTES,
    Channel,
    ChannelTransfer,
    Inbox,
    Outbox,
    TakenMessage,
    dtype_digest,
)
from meshwright.comm.shared_memory.queue import Background, SharedWork
from meshwright.comm.shared_memory.waits import LEFT, Meeting, unusable
from meshwright.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
)

ANY_SOURCE = -1
CHECK_EVERY = 0.1
"""Seconds between two looks of the background thread at the peers' lives."""


class _OwnedTransfer(ChannelTransfer):
    """A transfer that is moved by the engine of its group."""

    def __init__(
        self,
        owner: Transfers,
        kind: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        label: str,
        limit: float,
    ) -> None:
        super().__init__(kind, tensor, peer, tag, label, limit)
        self.owner = owner

    def is_completed(self) -> bool:
        """Check whether the transfer has ended; looks for its message when it has not."""
        if not self.done:
            self.owner.look()
        return self.done

    def _drive(self, until: float) -> bool:
        return self.owner.drive(self, until)

    def _late(self, seconds: float) -> str:
        return self.owner.late(self, seconds)


class Transfers:
    """The sends and receives of a group. They never wait behind a collective."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        me, size = meeting.peers.me, meeting.layout.size
        self._meeting = meeting
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
        """Send ``tensor`` to rank ``peer`` of the group."""
        limit = time.monotonic() + self._meeting.timeout
        return self._begin(_OwnedTransfer(self, "send", tensor, peer, tag, label, limit))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, label: str) -> SharedWork:
        """Receive into ``tensor`` from rank ``peer`` of the group, or from `ANY_SOURCE`."""
        limit = time.monotonic() + self._meeting.timeout
        return self._begin(_OwnedTransfer(self, "recv", tensor, peer, tag, label, limit))

    def close(self) -> None:
        """End the background thread."""
        self._background.close()

    def look(self) -> bool:
        """Move what can be moved without waiting; tells whether anything was."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._move()
        finally:
            self._lock.release()
            self._announce()

    def drive(self, transfer: ChannelTransfer, until: float) -> bool:
        """Move messages until ``transfer`` has ended; False when ``until`` comes first."""
        meeting = self._meeting
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
        meeting = self._meeting
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
        """Look once, in the background thread; returns whether anything has moved."""
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
        """Fail all transfers when the peer of ``transfer`` is gone or its time is over."""
        if transfer.done:
            return
        meeting = self._meeting
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
        meeting = self._meeting
        others = [rank for rank in range(meeting.layout.size) if rank != meeting.peers.me]
        return [rank for rank in others if meeting.state(rank) != LEFT] or others

    def late(self, transfer: ChannelTransfer, seconds: float) -> str:
        """Describe who is missing in ``transfer`` after ``seconds``."""
        peers = self._meeting.peers
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
        self._meeting.break_with(error)
        for transfer in list(self._open):
            self._end(transfer, error)

    def _move(self) -> bool:
        """Bring all transfers forward as far as they go; tells whether anything has moved."""
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
        self._meeting.ring(peer, self._rings)

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
                    message.keep(address)
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
        """Give messages that came before their receives to them, both in order."""
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
        numbers, dtype = self._meeting.peers.ranks, receive.buffer.dtype
        if message.nbytes != receive.nbytes or message.dtype != dtype_digest(dtype):
            self._end(
                receive,
                error := CollectiveMismatchError(
                    f"rank {numbers[message.source]} called {message.text} and "
                    f"rank {numbers[self._meeting.peers.me]} called {receive} for it"
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
