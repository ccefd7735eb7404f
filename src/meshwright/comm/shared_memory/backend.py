"""The c10d backend ``meshwright``, and how the ranks of a new group join one arena.

Importing `meshwright.comm` registers it with `torch.distributed`; then
``init_process_group("cpu:meshwright")``, subgroups, `DeviceMesh`, functional collectives and
DTensor work on it. Each group is decided separately: if its ranks are processes of one user on one
host, it shares memory; otherwise it is an ordinary Gloo group.

The ranks meet by their store. Each either writes its number into the arena or writes into the store
why it cannot map it. So either all ranks see all numbers, or all read a refusal: they never
disagree.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from meshwright.comm.failures.processes import is_alive, process_start
from meshwright.comm.failures.waiting import explain, watched
from meshwright.comm.groups.python_group import GroupOptions
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.shared_memory.arena import (
    ArenaLayout,
    Segment,
    SharedTensors,
    host_identity,
    unsupported,
)
from meshwright.comm.shared_memory.collectives import SLOT_BYTES
from meshwright.comm.shared_memory.group import BACKEND, SharedMemoryGroup
from meshwright.comm.shared_memory.transfers import CHANNEL_BYTES
from meshwright.comm.shared_memory.waits import PID, STARTED, Meeting, Peers
from meshwright.environment import local_size
from meshwright.errors import CollectiveTimeoutError, CommunicationError, RankFailedError
from meshwright.torch_internals.distributed import add_backend, known_backends, number_operations

_log = logging.getLogger("meshwright")

ARENA, REFUSED = "meshwright/arena", "meshwright/refused"
"""Keys of the store: where the arena is, and why a rank cannot take part."""
LOOK_EVERY = 0.05
"""Seconds between two looks at whether a rank has refused."""


class _Host:
    """The shared-memory tensors of this process, common to its groups."""

    def __init__(self) -> None:
        self.tensors = SharedTensors()
        self._groups: dict[int, SharedMemoryGroup] = {}
        self._known: dict[int, tuple[int, int]] = {}
        """Process id and start time of the ranks of this host that were met, by world number."""
        self.crowd = 1
        """The most ranks on this host that are known of."""

    def create(self, options: GroupOptions, backend_options: object) -> dist.ProcessGroup:
        """Make a group: the creator function that c10d calls on each rank."""
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        if not dist.is_initialized():
            self._known.clear()  # a new world has ranks of its own
        crowd = max(self.crowd, local_size() or 1, len(ranks))
        timeout = options.timeout.total_seconds()
        try:
            meeting = join(options.store, options.group_rank, ranks, crowd, timeout, self._known)
        except ApartError as error:
            _log.info("group %s communicates through Gloo: %s", options.group_id, error)
            return _gloo_group(options, ranks)
        self.crowd = crowd
        self._known.update(zip(ranks, meeting.peers.processes, strict=True))
        group = SharedMemoryGroup(options, meeting, self.tensors, self._forget)
        self._groups[id(group)] = group
        return group

    def _forget(self, group: SharedMemoryGroup) -> None:
        self._groups.pop(id(group), None)

    def close(self) -> None:
        """Leave all groups, when the interpreter exits."""
        for group in list(self._groups.values()):
            group.shutdown()


def _gloo_group(options: GroupOptions, ranks: Sequence[int]) -> dist.ProcessGroup:
    store = dist.PrefixStore("gloo", options.store)
    transport = dist.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )
    transport.options.global_ranks_in_group = list(ranks)
    transport.options.group_name = options.group_id  # pyrefly: ignore[bad-assignment]
    number_operations(transport)
    group = dist.ProcessGroup(store, options.group_rank, options.group_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    add_backend(group, torch.device("cpu"), kind, transport)
    return group


def register() -> None:
    """Register the backend with `torch.distributed`. Further calls do nothing."""
    if BACKEND.upper() in known_backends():
        return
    host = _Host()
    # Else peers that still wait would take this process for one that was lost.
    atexit.register(host.close)
    dist.Backend.register_backend(BACKEND, host.create, extended_api=True, devices=["cpu"])


def allocate(group: dist.ProcessGroup | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized 1-D tensor that ranks gather and reduce in place, in every group.

    ``group`` is any group of this backend. For others, and None, it is an ordinary tensor. A forked
    child sees the same memory and must not write to it.
    """
    if isinstance(group, SharedMemoryGroup):
        return group.tensors.allocate(numel, dtype)
    return torch.empty(numel, dtype=dtype, device="cpu")


# ---------------------------------------------------------------- the way to one arena


class ApartError(Exception):
    """The ranks of a group cannot share memory: every rank gets this, with the same reason."""


def join(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    crowd: int,
    timeout: float,
    known: Mapping[int, tuple[int, int]],
) -> Meeting:
    """Map the arena that ``ranks`` (world numbers) share; the first of them creates it.

    ``crowd`` is the number of ranks on this host, ``known`` the processes (id and start time) of
    ranks met before. Raises `ApartError` when the ranks are not of one host and user,
    `RankFailedError` when one has ended, `CollectiveTimeoutError` naming those that are missing.
    """
    layout = ArenaLayout(len(ranks), SLOT_BYTES, CHANNEL_BYTES)
    limit = time.monotonic() + timeout
    if rank == 0:
        segment = _create(store, layout, ranks)
    else:
        _await_first(store, ranks, limit, known)
        segment = _open(store, layout, ranks[rank])
    try:
        first = layout.rank_word(rank)
        segment.words[first + STARTED] = process_start(os.getpid())
        segment.words[first + PID] = os.getpid()
        _await_all(store, segment, layout, ranks, limit, known)
    finally:
        segment.close_descriptor()  # all have mapped it, or some never will
    words = [layout.rank_word(index) for index in range(layout.size)]
    processes = [(segment.words[word + PID], segment.words[word + STARTED]) for word in words]
    return Meeting(segment, layout, Peers(processes, ranks, rank), crowd, timeout)


def _create(store: dist.Store, layout: ArenaLayout, ranks: Sequence[int]) -> Segment:
    reason = unsupported()
    if reason:
        store.set(REFUSED, f"rank {ranks[0]}: {reason}")
        store.set(ARENA, "")
        raise ApartError(f"rank {ranks[0]}: {reason}")
    segment = Segment.create("meshwright-arena", layout.nbytes)
    if len(ranks) > 1:
        store.set(ARENA, f"{os.getpid()} {segment.descriptor} {host_identity()}")
    return segment


def _open(store: dist.Store, layout: ArenaLayout, number: int) -> Segment:
    place = store.get(ARENA).decode()
    if not place:
        raise ApartError(store.get(REFUSED).decode())
    pid, descriptor, identity = place.split(" ", 2)
    reason = unsupported()
    try:
        if not reason and identity != host_identity():
            reason = (
                f"it is on {host_identity()} and the first rank of its group on {identity} "
                "(host, boot, process-id namespace, user)"
            )
        if not reason:
            return Segment.open(int(pid), int(descriptor), layout.nbytes)
    except CommunicationError as error:
        reason = str(error)
    reason = f"rank {number} cannot share memory: {reason}"
    store.set(REFUSED, reason)
    raise ApartError(reason)


def _await_first(
    store: dist.Store, ranks: Sequence[int], limit: float, known: Mapping[int, tuple[int, int]]
) -> None:
    pause, look_at = 0.0002, time.monotonic() + LOOK_EVERY
    what = f"the opening of the group of ranks {_listed(ranks)}"
    with watched(what, lambda: ranks[:1]) as look:
        while not store.check([ARENA]):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                look()
                _check_lives(ranks[:1], ranks, known)
            if now >= limit:
                raise CollectiveTimeoutError(
                    f"the group of ranks {_listed(ranks)} was not opened by rank {ranks[0]} in time"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.005)


def _await_all(
    store: dist.Store,
    segment: Segment,
    layout: ArenaLayout,
    ranks: Sequence[int],
    limit: float,
    known: Mapping[int, tuple[int, int]],
) -> None:
    pause, look_at = 0.0001, time.monotonic() + LOOK_EVERY
    missing: list[int] = []
    what = f"the opening of the group of ranks {_listed(ranks)}"
    with watched(what, lambda: missing) as look:
        while True:
            missing = [
                number
                for rank, number in enumerate(ranks)
                if not segment.words[layout.rank_word(rank) + PID]
            ]
            if not missing:
                return
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                look()
                if store.check([REFUSED]):
                    raise ApartError(store.get(REFUSED).decode())
                _check_lives(missing, ranks, known)
            if now >= limit:
                raise CollectiveTimeoutError(
                    f"the group of ranks {_listed(ranks)} was not joined by "
                    f"rank{'s' if len(missing) > 1 else ''} {_listed(missing)} in time"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.005)


def _check_lives(
    missing: Sequence[int], ranks: Sequence[int], known: Mapping[int, tuple[int, int]]
) -> None:
    """Raise when a known, awaited rank has ended, with the reason it gave, if any."""
    for number in missing:
        if number in known and not is_alive(*known[number]):
            error = RankFailedError(
                f"rank {number} (process {known[number][0]}) was lost (its process has ended) "
                f"before it joined the group of ranks {_listed(ranks)}",
                number,
            )
            monitor = PROCESS.monitor
            if monitor is not None:
                what = f"the opening of the group of ranks {_listed(ranks)}"
                explain(monitor, error, f"rank {monitor.rank} was waiting for {what}")
            raise error


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
