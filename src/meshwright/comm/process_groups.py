"""Joining the ranks, making sub-groups, and leaving cleanly.

::

    torchrun's environment ──> store ──> roll of ranks ──> process group ──> Communicator
                               (prefixed with the restart count, so that a restarted
                                attempt never reads the addresses of the one before)
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.comm.collectives import Communicator
from meshwright.comm.failure import FailureMonitor, one_line
from meshwright.comm.launch import record_failure
from meshwright.comm.registry import PROCESS
from meshwright.comm.waiting import blame
from meshwright.errors import CommunicationError, LayoutError

__all__ = [
    "check_peers",
    "communicator",
    "connect",
    "disconnect",
    "host_store",
    "is_connected",
    "peers",
    "subgroup",
    "union",
    "watch_run",
]

_log = logging.getLogger("meshwright")

DEFAULT_TIMEOUT = 60.0
"""Seconds after which a wait gives up on a CPU; compile time does not count."""

HANG_AFTER = 10.0
"""Seconds after which a wait is reported as a hang."""

TRANSPORT_TIMEOUT = timedelta(hours=24)
"""c10d's own bound. Ours is shorter and names ranks; c10d's would close connections for good."""

_WITHOUT_PROCESSES = frozenset({"fake", "threaded"})
"""Backends whose ranks are not processes."""

LEAVE_TIMEOUT = 10.0
"""Seconds that a rank which is done waits for the others before it closes its connections."""


def connect(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: dist.Store | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    hang_after: float = HANG_AFTER,
) -> Communicator:
    """Join the ranks of this run and return the communicator of all of them.

    Rank, world size and address come from torchrun's environment variables, from the arguments, or,
    when there is neither, this process is a world of its own. A default group that exists already
    is used as it is. ``timeout`` and ``hang_after`` are in seconds: a wait longer than
    ``hang_after`` is reported, one longer than ``timeout`` ends, both naming the missing ranks.
    ``backend`` is ``"gloo"``, ``"shm"`` or any name that c10d knows. None chooses NCCL on GPUs, and
    on CPUs what ``MESHWRIGHT_CPU_BACKEND`` says, else ``"shm"``: groups whose ranks share a host
    and a user communicate through shared memory, other groups through Gloo.

    Raises `CommunicationError` when the address cannot be reached or used, or when ranks have not
    come within ``timeout``: the message names them.
    """
    if dist.is_initialized():
        base: dist.Store = dist.distributed_c10d._get_default_store()
    else:
        base = _join(backend, rank, world_size, store, timeout)
    world = communicator(None, "world", timeout=timeout)
    _monitor(world, base, hang_after)
    return world


def watch_run(members: Communicator) -> None:
    """Let ranks name the first that fails, also where `connect` has not been called.

    Every rank of ``members`` calls it. Nothing happens unless these are all the ranks of a default
    group that communicates: a rank that nobody watches would be taken for one that is lost.
    """
    if PROCESS.monitor is not None or members.size == 1 or not dist.is_initialized():
        return
    if members.size == dist.get_world_size() and dist.get_backend() not in _WITHOUT_PROCESSES:
        world = communicator(None, timeout=members.timeout)
        _monitor(world, dist.distributed_c10d._get_default_store(), HANG_AFTER)


def _monitor(world: Communicator, base: dist.Store, hang_after: float) -> None:
    if PROCESS.monitor is None:
        board = dist.PrefixStore(f"meshwright/board/{world.name}", base)
        PROCESS.monitor = FailureMonitor(board, world.rank, world.size, hang_after=hang_after)
        _ExceptionHook.install()
        atexit.register(disconnect)


def host_store(address: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """A store in this process where the ranks of a run can meet, as in torchrun's agent.

    The system chooses a free port for 0; it is the store's ``port``.
    """
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)


def is_connected() -> bool:
    """Whether this process has joined a run through `connect`."""
    return PROCESS.monitor is not None and dist.is_initialized()


def check_peers() -> None:
    """Raise `RankFailedError` when another rank has failed; for long work between collectives."""
    if PROCESS.monitor is not None:
        PROCESS.monitor.check()


def disconnect() -> None:
    """Leave the run: wait for the others, stop the monitor, destroy the groups. Idempotent.

    A rank that closed its connections while another still finishes an operation would look like a
    failure there, so all ranks wait for each other, briefly, when none has failed.
    """
    monitor, PROCESS.monitor = PROCESS.monitor, None
    clean = True
    if monitor is not None:
        monitor.is_leaving = True
        atexit.unregister(disconnect)
        _ExceptionHook.remove()
        clean = monitor.failure is None and dist.is_initialized() and _leave_together(monitor)
        monitor.stop()
    if dist.is_initialized():
        if not clean:
            _abandon(PROCESS.communicators)
        PROCESS.communicators.clear()
        dist.destroy_process_group()
    PROCESS.release()
    # Works and futures that are in reference cycles own transport threads; they must end before
    # the interpreter does, or the C++ runtime aborts the process.
    gc.collect()


def communicator(
    group: dist.ProcessGroup | None = None,
    axis: str | None = None,
    *,
    timeout: float | None = None,
) -> Communicator:
    """The communicator of ``group`` (all ranks when None); one for each group.

    ``axis`` is what the caller's operations are recorded and reported under: a group that serves
    two axes counts its operations once and names each by its own. Without it the group's first
    name holds, "world" when it has none. ``timeout`` is in seconds.
    """
    if not dist.is_initialized():
        raise CommunicationError(
            "this process has joined no run: call meshwright.comm.connect() first, "
            "or torch.distributed.init_process_group"
        )
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    found = PROCESS.communicators.get(group)
    if found is None:
        bound = timeout or _timeout_of_world() or DEFAULT_TIMEOUT
        found = Communicator(group, axis or "world", _device_of(group), bound)
        PROCESS.communicators[group] = found
    if axis is None or axis == found.axis:
        return found
    # A shallow copy shares the counts of operations and what is remembered of them.
    named = copy.copy(found)
    named.axis = axis
    return named


def subgroup(parent: Communicator, groups: Sequence[Sequence[int]], axis: str) -> Communicator:
    """This rank's communicator among ``groups``, which split the ranks of ``parent``.

    Every rank of the world calls it with the same ``groups`` (numbers of the world). A split that
    equals ``parent`` gives a communicator of this ``axis`` on the same c10d group: no second group
    is made, and operations are counted once.
    """
    mine = [tuple(ranks) for ranks in groups if dist.get_rank() in ranks]
    flat = sorted(rank for ranks in groups for rank in ranks)
    if len(mine) != 1 or flat != sorted(parent.ranks):
        raise LayoutError(
            f"axis {axis}: expected groups that hold each of the ranks {list(parent.ranks)} once, "
            f"found {[list(ranks) for ranks in groups]}"
        )
    if mine[0] == parent.ranks:
        return communicator(parent.group, axis)
    for known in list(PROCESS.communicators.values()):
        if known.is_open and known.ranks == mine[0] and known.axis == axis:
            return known
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(f"axis {axis}: rank {dist.get_rank()} is in none of the groups")
    return communicator(group, axis, timeout=parent.timeout)


def peers(parent: Communicator, ranks: Sequence[int], axis: str) -> Communicator:
    """The communicator of ``ranks`` (numbers of the world), among them this one, of ``parent``.

    Only they call it, so the rest of the world may do something else. No group is made for ranks
    that have one already, under that axis or as ``parent``.
    """
    wanted, mine = tuple(ranks), dist.get_rank()
    if mine not in wanted or not set(wanted) <= set(parent.ranks):
        raise LayoutError(
            f"axis {axis}: expected some of the ranks {list(parent.ranks)} and rank {mine} among "
            f"them, found {list(wanted)}"
        )
    if wanted == parent.ranks:
        return communicator(parent.group, axis)
    for known in list(PROCESS.communicators.values()):
        if known.is_open and known.ranks == wanted and known.axis == axis:
            return known
    group = dist.new_group(list(wanted), use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(f"axis {axis}: c10d made no group of the ranks {list(wanted)}")
    return communicator(group, axis, timeout=parent.timeout)


def union(axes: Sequence[Communicator]) -> Communicator:
    """The communicator of all ranks that are reached along ``axes``, which are those of one grid.

    All of them call it with the same axes in the same order. The first time they tell each other
    who they are, and a group is made where there is none. Raises LayoutError where the axes form
    no grid.
    """
    first, *others = dict.fromkeys(axes)
    key = tuple(others)
    if not others:
        return first
    known = first.unions.get(key)
    if known is None or not known.is_open:
        for gone in [axes for axes in first.unions if not all(axis.is_open for axis in axes)]:
            del first.unions[gone]
        name = "+".join(axis.axis for axis in (first, *others))
        ranks = {dist.get_rank()}
        for is_check in (False, True):
            for axis in (first, *others):
                told = json.dumps(sorted(ranks)).encode()
                rows = axis.gather_bytes(told, label=f"ranks of {name}")
                reached = {rank for row in rows for rank in json.loads(row)}
                if is_check and reached != ranks:
                    raise LayoutError(
                        f"the axes {name} form no grid: of rank {dist.get_rank()} they reach "
                        f"{sorted(ranks)}, of its peers on {axis.axis} {sorted(reached)}"
                    )
                ranks = reached
        first.unions[key] = peers(communicator(), sorted(ranks), name)
    return first.unions[key]


# -------------------------------------------------------------------------- joining


def _join(
    backend: str | None,
    rank: int | None,
    world_size: int | None,
    store: dist.Store | None,
    timeout: float,
) -> dist.Store:
    """Make the default group and return the store that all its ranks share."""
    if store is None:
        store, rank, world_size = _open_store(rank, world_size, timeout)
    if rank is None or world_size is None:
        raise ValueError("a store was given without rank and world_size: give all three")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = dist.PrefixStore(f"meshwright/attempt/{attempt}", store)
    roll = _sign_in(run, rank, world_size, timeout)
    backend = _choose_backend(backend, roll, rank)
    try:
        dist.init_process_group(
            backend, store=run, rank=rank, world_size=world_size, timeout=TRANSPORT_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank} of {world_size} cannot open backend {backend!r}: {one_line(error)}"
        ) from error
    return run


def _open_store(
    rank: int | None, world_size: int | None, timeout: float
) -> tuple[dist.Store, int, int]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in os.environ]
    if rank is None and world_size is None and not found:
        return dist.HashStore(), 0, 1
    rank = int(os.environ["RANK"]) if rank is None and "RANK" in os.environ else rank
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    if rank is None or world_size is None:
        raise CommunicationError(
            f"expected {', '.join(names)} in the environment, found only {', '.join(found)}: "
            "start the ranks with torchrun, or set all four"
        )
    if world_size == 1 and "MASTER_PORT" not in os.environ:
        return dist.HashStore(), 0, 1
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "29500"))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    try:
        store = dist.TCPStore(
            host, port, world_size, serves, timedelta(seconds=timeout), wait_for_workers=False
        )
    except RuntimeError as error:
        what = "listen on" if serves else "reach the store of rank 0 at"
        raise CommunicationError(
            f"rank {rank} of {world_size} cannot {what} {host}:{port}: {one_line(error)}; "
            "is the port taken by another program, or rank 0 not started? "
            "Set MASTER_PORT to a free port on every rank"
        ) from error
    return store, rank, world_size


def _sign_in(
    store: dist.Store, rank: int, world_size: int, timeout: float
) -> list[Mapping[str, Any]]:
    """Write this rank into the roll, wait for the others, and return every rank's entry."""
    unsupported = shared_memory.unsupported()
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "place": "" if unsupported else shared_memory.host_identity(),
        "unsupported": unsupported,
    }
    if store.add(f"roll/count/{rank}", 1) != 1:
        raise CommunicationError(
            f"rank {rank} has joined this run already, as {store.get(f'roll/{rank}').decode()}: "
            "two processes have the same RANK"
        )
    store.set(f"roll/{rank}", json.dumps(mine))
    until = time.monotonic() + timeout
    keys = [f"roll/{other}" for other in range(world_size)]
    pause = 0.001
    while not store.check(keys):
        if time.monotonic() > until:
            absent = [r for r, key in enumerate(keys) if not store.check([key])]
            raise CommunicationError(
                f"rank {rank} waited {timeout:g} s for {world_size} ranks: "
                f"rank {', '.join(map(str, absent))} did not come"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return [json.loads(store.get(key)) for key in keys]


def _choose_backend(asked: str | None, roll: Sequence[Mapping[str, Any]], rank: int) -> str:
    """c10d's name of the backends that serve this world.

    NCCL where every rank of this host has a GPU of its own. CPU tensors go through shared memory
    where ranks share a host, group by group, unless Gloo is ``asked`` for or set in
    ``MESHWRIGHT_CPU_BACKEND``.
    """
    if asked not in (None, "gloo", "shm"):
        return str(asked)
    hosts = [entry["host"] for entry in roll]
    local = int(os.environ.get("LOCAL_RANK", hosts[:rank].count(hosts[rank])))
    if torch.cuda.is_available() and torch.cuda.device_count() >= hosts.count(hosts[rank]):
        torch.cuda.set_device(local)
        return "cpu:gloo,cuda:nccl"
    choice = asked or os.environ.get("MESHWRIGHT_CPU_BACKEND")
    if choice not in (None, "gloo", "shm"):
        raise ValueError(f"MESHWRIGHT_CPU_BACKEND: expected gloo or shm, found {choice!r}")
    reason = "Gloo was asked for" if choice == "gloo" else _no_shared_memory(roll)
    if reason:
        if choice != "gloo" and rank == 0:
            level = logging.WARNING if choice == "shm" else logging.INFO
            _log.log(level, "%s: the ranks communicate through Gloo", reason)
        return "gloo"
    shared_memory.register()
    return f"cpu:{shared_memory.BACKEND}"


def _no_shared_memory(roll: Sequence[Mapping[str, Any]]) -> str:
    """Why no two of these ranks can share memory, the same text on all; empty when some can."""
    for rank, entry in enumerate(roll):
        if entry["unsupported"]:
            return f"rank {rank}: {entry['unsupported']}"
    places = [entry["place"] for entry in roll]
    if len(places) > 1 and len(set(places)) == len(places):
        return f"the {len(places)} ranks are on as many hosts"
    return ""


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """CUDA when the group can move CUDA tensors, else CPU."""
    types = {device.type for device in group._device_types}
    if "cuda" in types and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _timeout_of_world() -> float | None:
    world = PROCESS.communicators.get(dist.distributed_c10d._get_default_group())
    return None if world is None else world.timeout


# -------------------------------------------------------------------------- leaving


def _leave_together(monitor: FailureMonitor) -> bool:
    """Wait until every rank is done; the store's host waits until the others have seen that.

    Returns whether all came. A store that is gone has nobody left to wait for.
    """
    board, world, rank = monitor.board, monitor.world_size, monitor.rank
    with contextlib.suppress(RuntimeError):
        board.add("leaving", 1)
        all_came = _wait_for_count(monitor, "leaving", world)
        if rank == 0:
            monitor.stop()
            monitor.erase()
        board.add("left", 1)
        if rank == 0 and all_came:
            _wait_for_count(monitor, "left", world)
        return all_came
    return False


def _abandon(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keep the groups of a failed run alive until the process ends.

    A Gloo group's destructor joins threads that may sit in an operation whose peer is gone or
    stopped: it would block the exit for ever.
    """
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _wait_for_count(monitor: FailureMonitor, key: str, expected: int) -> bool:
    until, pause = time.monotonic() + LEAVE_TIMEOUT, 0.001
    while monitor.board.add(key, 0) < expected and time.monotonic() < until:
        if monitor.failure is not None:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return monitor.board.add(key, 0) >= expected


class _ExceptionHook:
    """Publishes an exception that ends this process, before Python prints it."""

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if PROCESS.monitor is not None:
            first = blame(PROCESS.monitor, error)
            if first:
                error.add_note(first)
            else:
                PROCESS.monitor.publish(error)
        record_failure(error)
        self.before(kind, error, trace)

    @classmethod
    def install(cls) -> None:
        sys.excepthook = cls(sys.excepthook)

    @classmethod
    def remove(cls) -> None:
        if isinstance(sys.excepthook, cls):
            sys.excepthook = sys.excepthook.before
