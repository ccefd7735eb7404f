"""Joining the ranks, making sub-groups, and leaving cleanly.

::

    store ──> membership (watched from here on) ──> roll of ranks ──> process group ──> Communicator
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.comm.c10d import nccl
from meshwright.comm.c10d.checking import CallChecks
from meshwright.comm.collectives import Communicator
from meshwright.comm.failures import membership, watchdog
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.sameness import require_equal
from meshwright.comm.failures.status import one_line
from meshwright.comm.failures.store import STORE
from meshwright.comm.failures.waiting import explain
from meshwright.comm.groups import device_choice, rendezvous
from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.memory.heap import keep_freed
from meshwright.comm.observing.late import settle
from meshwright.comm.streams import Clock, is_host
from meshwright.environment import is_set
from meshwright.errors import (
    CheckpointWriteError,
    CommunicationError,
    LayoutError,
    RankFailedError,
    warn,
)
from meshwright.torch_internals.distributed import (
    abort_together,
    backend_of,
    can_abort,
    default_group,
    default_store,
    groups_to_abort,
    make_group,
    set_timeout,
    timeout_of,
)

__all__ = [
    "apart",
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

HANG_AFTER = 10.0
"""Seconds after which a wait is reported as a hang."""

TRANSPORT_TIMEOUT = timedelta(hours=24)
"""The time by which c10d's own limit is longer than the user's. c10d's would close connections or
end the process, and names nobody; it knows nothing of ranks that compile or work, which are waited
for past the user's limit, and cannot be put off once an operation is under way. Waits end by the
rules of `meshwright.comm.failures.waiting`."""

_WITHOUT_PROCESSES = frozenset({"fake", "threaded"})
"""Backends whose ranks are not processes."""


def connect(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: dist.Store | None = None,
    timeout: float | None = None,
    hang_after: float = HANG_AFTER,
    check: bool | None = None,
) -> Communicator:
    """Join the ranks of this run and return the communicator of all of them.

    Rank, world size and address come from the arguments, or from the launcher's environment
    (torchrun, srun: see `meshwright.environment`); without either, this process is a world of one.
    An existing default group, such as an engine's, is used unchanged; the log names its backend.
    ``backend`` is ``"gloo"`` or ``"shm"`` for CPU ranks, or any name that c10d knows
    (``"cpu:gloo,cuda:gloo"``: GPUs through Gloo). None chooses NCCL if every rank of the world has
    its own GPU, otherwise CPUs with ``MESHWRIGHT_CPU_BACKEND``, by default ``"shm"``: groups whose
    ranks share a host and a user communicate through shared memory, other groups through Gloo. See
    `comm.groups.device_choice`. A rank's GPU becomes its current device.

    ``timeout`` and ``hang_after`` are in seconds. A wait longer than ``hang_after`` is reported,
    naming the missing ranks. Without a ``timeout``, ranks wait for each other as long as the other
    is alive and working: see `comm.failures.waiting`. With one, every wait ends at it, except for a
    rank that compiles or is in a phase with a longer limit. The timeout of an existing default
    group is used, unless it is c10d's default.

    With ``check`` every call of every group, by Meshwright or by torch's own functions, is compared
    across ranks before data moves: for debugging, not for training. None reads the environment
    variable ``MESHWRIGHT_CHECK``. See ``docs/checks.md``.

    Raises `CommunicationError` when the address or the backend cannot be used, or when ranks are
    missing after ``timeout`` (ten minutes by default): the message names them. Raises
    `RankFailedError` for a rank that ended meanwhile.
    """
    if not dist.is_initialized():
        _join(backend, rank, world_size, store, timeout, hang_after)
        _check_calls(check)
        return communicator(None, "world", timeout=timeout)
    world = communicator(None, "world", timeout=timeout)
    if world.backend not in _WITHOUT_PROCESSES:
        _watch_world(world, hang_after)
        _check_calls(check)
    return world


def _check_calls(check: bool | None) -> None:
    is_asked = is_set("MESHWRIGHT_CHECK") if check is None else check
    if is_asked and PROCESS.checks is None:
        CallChecks(communicator).install()


def watch_run(members: Communicator) -> None:
    """Have ranks name the first that fails, also where `connect` has not been called.

    Every rank of ``members`` calls it. Does nothing unless these are all the ranks of a default
    group that communicates: an unwatched rank would be taken for a lost one.
    """
    if PROCESS.monitor is not None or members.size == 1 or not dist.is_initialized():
        return
    if members.size == dist.get_world_size() and members.backend not in _WITHOUT_PROCESSES:
        _watch_world(communicator(None, timeout=members.timeout), HANG_AFTER)


def _watch_world(world: Communicator, hang_after: float) -> None:
    if PROCESS.monitor is None:
        if world.rank == 0:
            what = f"{world.size} ranks, backend {world.backend}, on {world.device}"
            _log.info("the default process group that exists is used as it is: %s", what)
        store = default_store()
        board = dist.PrefixStore(f"meshwright/board/{world.name}", store)
        limit = world.timeout
        monitor = membership.enter(
            board, world.rank, world.size, hang_after=hang_after, limit=limit
        )
        _limit_of(world.group, world.device)  # c10d's own comes later, now that we watch
        if world.device.type == "cuda" and world.backend == "nccl":
            entry = device_choice.own_entry(None, chosen=world.device.index)
            device_choice.require_own_devices(rendezvous.sign_in(monitor, entry, limit))
        else:
            monitor.sign_in({})
        _be_member()


def _be_member() -> None:
    keep_freed()
    membership.ExceptionHook.install()
    atexit.register(_leave_at_exit)


def host_store(address: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Host a store in this process where the ranks of a run can meet, as in torchrun's agent.

    Port 0 takes a free one; it is the store's ``port``.
    """
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)


@functools.cache
def _warn_of_fake() -> None:
    warn(
        "the ranks of torch's fake process group are no processes: nothing is sent, and whether "
        "they fail or do other things than this one is not checked"
    )


def is_connected() -> bool:
    """Check whether this process has joined a run through `connect`."""
    return PROCESS.monitor is not None and dist.is_initialized()


def check_peers() -> None:
    """Raise `RankFailedError` when another rank has failed; for long work between collectives.

    Also raises the error for which the groups of this rank's devices were aborted, if any.
    """
    PROCESS.refuse()
    if PROCESS.monitor is not None:
        PROCESS.monitor.check()


def disconnect() -> None:
    """Leave the run: wait for the others, stop watching, destroy the groups. Idempotent.

    Closing connections while another rank still finishes an operation would look like a failure
    there, so all ranks wait for each other, briefly, when none has failed. The rank that hosts the
    store waits as long as the others live.

    Raises `RankFailedError` for a lost rank, unless this rank has raised for it before, and the
    errors of deferred checks of values on a device (`settle`).
    """
    atexit.unregister(_leave_at_exit)
    membership.ExceptionHook.remove()
    is_clean = False
    try:
        try:
            _settle_at_the_end()
        finally:
            is_clean = membership.leave()
    finally:
        if dist.is_initialized():
            aborted = [] if is_clean else _abort_devices()
            if not is_clean:
                _abandon([*PROCESS.communicators, *aborted])
            PROCESS.communicators.clear()
            if not aborted:  # to destroy them would wait for c10d's watch over them
                dist.destroy_process_group()
        # Of a run that has failed. Only now: the others have been told before this takes its time.
        if PROCESS.saving is not None and (error := PROCESS.saving.leave()) is not None:
            _log.error("%s", error)
        PROCESS.release()
        # Works and futures that are in reference cycles own transport threads; they must end before
        # the interpreter does, or the C++ runtime aborts the process.
        gc.collect()


def _settle_at_the_end() -> None:
    """Run the outstanding deferred checks, unless this rank has failed; end a save under way."""
    monitor = PROCESS.monitor
    try:
        if monitor is not None and sys.exc_info()[1] is None:
            if not PROCESS.has_refused:
                PROCESS.refuse()
            if not monitor.has_raised:
                settle()
                if PROCESS.saving is not None:
                    PROCESS.saving.wait()
                if PROCESS.checks is not None:
                    PROCESS.checks.finish()
    finally:
        PROCESS.outstanding.clear()


def _leave_at_exit() -> None:
    """Leave the run when the interpreter exits; with status 1 if another rank was lost."""
    try:
        disconnect()
    except (RankFailedError, CheckpointWriteError) as error:
        membership.end_process(error)


def communicator(
    group: dist.ProcessGroup | None = None,
    axis: str | None = None,
    *,
    timeout: float | None = None,
) -> Communicator:
    """Return the communicator of ``group`` (all ranks when None); one for each group.

    ``axis`` is the name under which the caller's operations are recorded: a group that serves two
    axes counts its operations once and names each by its axis. By default the group's first name is
    used, "world" if it has none. ``timeout`` is in seconds; None takes the group's own, unless that
    is c10d's default. Raises TypeError for anything but a group, such as a mesh.
    """
    is_stand_in = group is not None and not isinstance(group, dist.ProcessGroup)
    if not is_stand_in and not dist.is_initialized():
        raise CommunicationError(
            "this process has joined no run: call meshwright.comm.connect() first, "
            "or torch.distributed.init_process_group"
        )
    if group is None:
        group = default_group()
    found = PROCESS.communicators.get(group)
    if is_stand_in:
        found = _StandIn(group)
    elif found is None:
        device = device_choice.device_of(group, default_group())
        limit = _limit_of(group, device) if timeout is None else timeout
        found = Communicator(group, axis or "world", device, limit)
        if found.backend == "fake":
            _warn_of_fake()
        PROCESS.communicators[group] = found
    if axis is None or axis == found.axis:
        return found
    return found.along(axis)


class _StandIn(Communicator):
    """A communicator on an object with only ``rank()`` and ``size()``, for layouts of any size."""

    # Not super().__init__(), which would ask c10d for a group.
    def __init__(self, group: Any) -> None:  # noqa: ANN401 - rank() and size()
        if not hasattr(group, "rank"):
            raise TypeError(
                f"expected a process group, found {type(group).__name__}: of a mesh give the group "
                "of one axis, mesh.get_group(axis)"
            )
        world = communicator() if dist.is_initialized() else None
        self.device = torch.device("cpu") if world is None else world.device
        self.timeout: float | None = None
        self.axis, self.backend = "world", ""
        self.is_on_host, self.is_followed = is_host(self.device), False
        self.waits_on_host, self._is_labeled = self.is_on_host, False
        self.clock = Clock(self.device)
        self.rank, self.size = group.rank(), group.size()
        self.is_alone = self.size == 1
        self.ranks, self.name = tuple(range(self.size)), f"{type(group).__name__} {id(group)}"
        self._group, self._living = lambda: group, (group,)
        self._begin()

    def _issue(self, *args: object, **kwargs: object) -> NoReturn:
        raise CommunicationError(
            f"axis {self.axis}: expected a process group of torch.distributed, found a "
            f"{type(self.group).__name__} with a rank and a size. A module can be built on it, but "
            "neither run nor gathered"
        )


def subgroup(parent: Communicator, groups: Sequence[Sequence[int]], axis: str) -> Communicator:
    """Return this rank's communicator among ``groups``, which split the ranks of ``parent``.

    A group equal to ``parent`` gives a communicator for this ``axis`` on the same c10d group: no
    second group is made, and operations are counted once. See `peers`.
    """
    mine = [ranks for ranks in groups if dist.get_rank() in ranks]
    flat = sorted(rank for ranks in groups for rank in ranks)
    if len(mine) != 1 or flat != sorted(parent.ranks):
        raise LayoutError(
            f"axis {axis}: expected groups that hold each of the ranks {list(parent.ranks)} once, "
            f"found {[list(ranks) for ranks in groups]}"
        )
    return peers(parent, mine[0], axis)


def peers(parent: Communicator, ranks: Sequence[int], axis: str) -> Communicator:
    """Find or make the communicator of ``ranks`` (world numbers, this one's too) of ``parent``.

    Only these ranks call it, so the rest of the world may do something else. No group is made if
    the ranks have one already, under that axis or as ``parent``.
    """
    wanted, mine = tuple(sorted(ranks)), dist.get_rank()
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
    name = f"{axis}/{PROCESS.name_group(wanted)}"
    group = make_group(name, wanted, _transport_timeout(parent.timeout))
    return communicator(group, axis, timeout=parent.timeout)


def apart(parent: Communicator, ranks: Sequence[int], name: str) -> Communicator:
    """Make a separate group of ``ranks`` (of the world), in addition to existing ones.

    Only these ranks call it, with a unique ``name``. It serves the axis of ``parent``.
    """
    group = make_group(name, sorted(ranks), _transport_timeout(parent.timeout))
    return communicator(group, parent.axis, timeout=parent.timeout)


def union(axes: Sequence[Communicator]) -> Communicator:
    """Return the communicator of all ranks reached along ``axes``, which form one grid.

    All of these ranks call it with the same axes in the same order. The first time they exchange
    their ranks, and a group is made if there is none. Raises LayoutError without a grid.
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
        for axis in (first, *others):
            rows = axis.gather_values(sorted(ranks), label=f"ranks of {name}")
            ranks = {rank for row in rows for rank in row}
        for axis in (first, *others):
            meaning = f"the ranks of the grid {name}"
            require_equal(axis, [sorted(ranks)], meaning, label=f"grid {name}", error=LayoutError)
        first.unions[key] = peers(communicator(), sorted(ranks), name)
    return first.unions[key]


# -------------------------------------------------------------------------- joining


def _join(
    backend: str | None,
    rank: int | None,
    world_size: int | None,
    store: dist.Store | None,
    timeout: float | None,
    hang_after: float,
) -> None:
    host, place = STORE, ""
    if store is None:
        store, rank, world_size, place = rendezvous.open_store(rank, world_size, timeout)
        host = STORE if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    if rank is None or world_size is None:
        raise ValueError("a store was given without rank and world_size: pass all three")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = PROCESS.runs_met[place] if host == STORE else 0  # rank 0 has a new store for each run
    if place:
        PROCESS.runs_met[place] += 1  # also where it fails below: the others count it, too
    run = dist.PrefixStore(f"meshwright/attempt/{attempt}/{number}", store)
    board = dist.PrefixStore("meshwright/board", run)
    monitor = membership.enter(
        board, rank, world_size, hang_after=hang_after, limit=timeout, host=host
    )
    try:
        _take_place(monitor)
        entries = rendezvous.sign_in(monitor, device_choice.own_entry(backend), timeout)
        _make_world(monitor, device_choice.choose(entries), run, timeout)
    except BaseException:
        with contextlib.suppress(RankFailedError):  # the error that is raised says it
            membership.leave()
        raise
    _be_member()


def _take_place(monitor: FailureMonitor) -> None:
    """Claim this rank's place in the run. Raises `CommunicationError` if it has none."""
    rank, size = monitor.rank, monitor.world_size
    if not monitor.ranks.claim():
        membership.resign()
        raise CommunicationError(
            f"rank {rank} has joined this run already: two processes have the same RANK, or "
            "one has joined twice by the same store=, where each run needs one of its own"
        )
    said, first = map(int, monitor.board.compare_set("size", "", f"{size} {rank}").split())
    if said == size:
        return
    if rank >= said:  # nobody there knows of this rank
        membership.resign()
    raise CommunicationError(
        f"expected one WORLD_SIZE on all ranks, found {said} on rank {first} and {size} on rank "
        f"{rank}: start all processes of a run with their number, and each run at a port of its own"
    )


def _make_world(
    monitor: FailureMonitor,
    choice: device_choice.Choice,
    store: dist.Store,
    timeout: float | None,
) -> None:
    rank, world_size = monitor.rank, monitor.world_size
    backend, index = choice.backend, choice.devices[rank]
    if rank == 0:
        for level, note in choice.notes:
            _log.log(level, "%s", note)
    device = None if index is None else torch.device("cuda", index)
    if device is not None:
        torch.cuda.set_device(device)
    nccl.prepare()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=_transport_timeout(timeout),
            device_id=device if choice.is_bound else None,
        )
    except RankFailedError:
        raise
    except (RuntimeError, ValueError) as error:
        what = f"rank {rank} of {world_size} cannot open backend {backend!r}"
        explain(monitor, error, what)
        raise CommunicationError(f"{what}: {one_line(error)}") from error


def _transport_timeout(limit: float | None) -> timedelta:
    """Return the timeout to give c10d for the user's ``limit`` in seconds."""
    return TRANSPORT_TIMEOUT + timedelta(seconds=limit or 0.0)


def _limit_of(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the user's timeout of ``group`` in seconds; None for c10d's default, and ours.

    If the run is watched, c10d's own timeout is set later than that from now on.
    """
    if isinstance(group, shared_memory.SharedMemoryGroup):
        given, change = timedelta(seconds=group.timeout), group.set_timeout
    elif can_abort(group, device) or (
        is_host(device) and isinstance(backend_of(group, device), dist.ProcessGroupGloo)
    ):
        transport = backend_of(group, device)
        given, change = timeout_of(transport.options), partial(set_timeout, transport)
    else:
        return None
    of_torch = dist.distributed_c10d
    defaults = (of_torch.default_pg_timeout, of_torch.default_pg_nccl_timeout, TRANSPORT_TIMEOUT)
    limit = None if given in defaults else given.total_seconds()
    if PROCESS.monitor is not None:
        change(_transport_timeout(limit))
    return limit


# -------------------------------------------------------------------------- leaving


def _abort_devices() -> list[dist.ProcessGroup]:
    """Abort the groups in which this rank's devices may hang; returns these, now unusable."""
    groups = groups_to_abort()
    if groups and PROCESS.stopped is None:
        PROCESS.stopped = CommunicationError(
            "this process has left its run without the other ranks"
        )
        abort_together(groups, watchdog.ABORT_WITHIN)
    return [group for group, _ in groups]


def _abandon(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keep the groups of a failed run alive until the process ends.

    A Gloo group's destructor joins threads that may be in an operation whose peer is gone or
    stopped: it would block the exit forever.
    """
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
