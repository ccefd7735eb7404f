"""One-way transfers between two ranks, matched by their order alone.

On a device a communicator has one queue: its k-th send to a rank matches that rank's k-th receive
from here, whatever their tags, and an unmatched one blocks everything issued after it. So each pair
of ranks and direction has its own communicator there, and no order among lanes can deadlock. Host
transports do not block: there all lanes of one number use the group itself, under one tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from meshwright.comm import Communicator, Pending, Transfer, apart

Pair = tuple[int, int]
"""(sending rank, receiving rank), of the group."""
_FIRST_TAG = 1 << 29


class Lanes:
    """The lanes of one rank of a group; ``number`` distinguishes them from other lanes."""

    def __init__(self, communicator: Communicator, pairs: Iterable[Pair], number: int) -> None:
        """Every rank gives the same ``pairs``; those without this rank are ignored."""
        self._communicator = communicator
        self._number = number
        mine = sorted((pair for pair in set(pairs) if communicator.rank in pair), key=_in_turn)
        self._closed = deque(mine)
        self._greeting: list[Pending] = []
        """Handshake with the other rank of the first lane that is not open yet."""
        self._tag = _FIRST_TAG + number if communicator.is_on_host else 0
        self._sends: dict[int, tuple[Communicator, int]] = {}
        """By the other rank, the lane to it, and the rank's number there."""
        self._receives: dict[int, tuple[Communicator, int]] = {}
        while self._closed and communicator.is_on_host:
            self._open(communicator, communicator.ranks)

    def open(self, watch: Callable[[], None]) -> None:
        """Create the communicators that the lanes need. Both ranks of a lane must call this.

        ``watch`` is called while this rank waits for another. If it raises, the next call
        continues where this one stopped.
        """
        while self._closed:
            self._meet(watch)
            parent, (source, target) = self._communicator, self._closed[0]
            ranks = sorted((parent.ranks[source], parent.ranks[target]))
            name = f"{parent.name}: lane {source} to {target} of schedule {self._number}"
            self._open(apart(parent, ranks, name), ranks)
            self._greeting.clear()

    def send(self, tensors: Iterable[torch.Tensor], peer: int, label: str) -> list[Pending]:
        """Send to rank ``peer``, as one operation where the transport can."""
        lane, number = self._sends[peer]
        transfer = partial(Transfer, "send", peer=number, tag=self._tag, label=label)
        return lane.batch(list(map(transfer, tensors)))

    def recv(self, tensors: Iterable[torch.Tensor], peer: int, label: str) -> list[Pending]:
        """Receive from rank ``peer`` into ``tensors`` what it sends with one `send`."""
        lane, number = self._receives[peer]
        transfer = partial(Transfer, "recv", peer=number, tag=self._tag, label=label)
        return lane.batch(list(map(transfer, tensors)))

    def _meet(self, watch: Callable[[], None]) -> None:
        """Wait until the other rank of the first unopened lane has reached it."""
        rank, control = self._communicator.rank, self._communicator.control
        source, target = self._closed[0]
        peer = target if rank == source else source
        if not self._greeting:
            for begin in (control.recv, control.send):
                word, label = torch.zeros(1, device="cpu"), f"lane {source} to {target}"
                self._greeting.append(begin(word, peer, tag=2 * self._number, label=label))
        for pending in self._greeting:
            pending.wait(watch=watch)

    def _open(self, lane: Communicator, ranks: Sequence[int]) -> None:
        source, target = self._closed.popleft()
        rank, whole = self._communicator.rank, self._communicator.ranks
        if rank == source:
            self._sends[target] = lane, ranks.index(whole[target])
        else:
            self._receives[source] = lane, ranks.index(whole[source])


def _in_turn(pair: Pair) -> tuple[int, int, Pair]:
    """Order lanes so that ranks which open theirs in this order never wait in a circle."""
    return min(pair), max(pair), pair
