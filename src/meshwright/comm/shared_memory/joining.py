"""How the ranks of a new group come to map one arena, by way of their store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from meshwright.comm.shared_memory.arena import ArenaLayout, Segment, host_identity
from meshwright.comm.shared_memory.channels import CHANNEL_BYTES
from meshwright.comm.shared_memory.collectives import SLOT_BYTES
from meshwright.comm.shared_memory.waits import (
    PID,
    STARTED,
    Meeting,
    Patience,
    Peers,
    process_start,
)
from meshwright.errors import CollectiveTimeoutError, CommunicationError

__all__ = ["join"]

ARENA, REFUSED = "meshwright/arena", "meshwright/refused"
"""Keys of the store: where the arena is, and why a rank cannot take part."""
LOOK_EVERY = 0.05
"""Seconds between two looks at whether a rank has refused."""


def join(store: dist.Store, rank: int, ranks: Sequence[int], crowd: int, timeout: float) -> Meeting:
    """Map the arena that ``ranks`` (world numbers) share; the first of them creates it.

    ``crowd`` is the number of ranks on this host. Raises `CommunicationError` when the ranks are
    not all on one host, `CollectiveTimeoutError` naming those that did not come.
    """
    layout = ArenaLayout(len(ranks), SLOT_BYTES, CHANNEL_BYTES)
    limit = time.monotonic() + timeout
    if rank == 0:
        segment = Segment.create("meshwright-arena", layout.nbytes)
        place = f"{os.getpid()} {segment.descriptor} {host_identity()}"
        if len(ranks) > 1:
            store.set(ARENA, place)
    else:
        _await_first(store, ranks, timeout)
        segment = _open(store, layout, ranks[rank])
    first = layout.rank_word(rank)
    segment.words[first + STARTED] = process_start(os.getpid())
    segment.words[first + PID] = os.getpid()
    _await_all(store, segment, layout, ranks, limit)
    segment.close_descriptor()
    words = [layout.rank_word(index) for index in range(layout.size)]
    processes = [(segment.words[word + PID], segment.words[word + STARTED]) for word in words]
    return Meeting(segment, layout, Peers(processes, ranks, rank), Patience.of(crowd), timeout)


def _await_first(store: dist.Store, ranks: Sequence[int], timeout: float) -> None:
    try:
        store.wait([ARENA], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CollectiveTimeoutError(
            f"the group of ranks {', '.join(map(str, ranks))} was not opened by rank {ranks[0]} "
            f"within {timeout:.3g} s: {error}"
        ) from error


def _open(store: dist.Store, layout: ArenaLayout, number: int) -> Segment:
    pid, descriptor, identity = store.get(ARENA).decode().split(" ", 2)
    try:
        if identity != host_identity():
            raise CommunicationError(
                f"rank {number} cannot share memory with the first rank of its group: it is on "
                f"{host_identity()}, that one on {identity} (host, boot, process-id namespace, "
                "user). Use the gloo backend for groups that span hosts"
            )
        return Segment.open(int(pid), int(descriptor), layout.nbytes)
    except CommunicationError as error:
        store.set(REFUSED, str(error))
        raise


def _await_all(
    store: dist.Store, segment: Segment, layout: ArenaLayout, ranks: Sequence[int], limit: float
) -> None:
    pause, look = 0.0001, time.monotonic() + LOOK_EVERY
    while True:
        missing = [
            number
            for rank, number in enumerate(ranks)
            if not segment.words[layout.rank_word(rank) + PID]
        ]
        if not missing:
            return
        now = time.monotonic()
        if now >= limit:
            raise CollectiveTimeoutError(
                f"the group of ranks {', '.join(map(str, ranks))} was not joined by "
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} in time"
            )
        if now >= look:
            look = now + LOOK_EVERY
            if store.check([REFUSED]):
                raise CommunicationError(store.get(REFUSED).decode())
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
