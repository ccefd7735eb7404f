"""Rendezvous of the ranks of a run: the store, and the list of all ranks.

::

    launcher's environment ──> store ──> roll of ranks ──> the choice of backend and devices
                               (prefixed with the restart count and the number of the run, so
                                that no run reads the addresses of the previous one)
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.status import one_line
from meshwright.comm.failures.store import carry_out
from meshwright.comm.failures.waiting import LINE_EVERY, UNSEEN
from meshwright.comm.groups.registry import PROCESS
from meshwright.environment import cluster
from meshwright.errors import CommunicationError

_log = logging.getLogger("meshwright")

T = TypeVar("T")


def open_store(
    rank: int | None, world_size: int | None, timeout: float | None
) -> tuple[dist.Store, int, int, str]:
    """Open the store where the ranks meet; returns it, the rank, the number of ranks, the address.

    `PROCESS` counts the runs of this process by address; it is "" for a process that is alone.
    Raises `CommunicationError` when the environment is incomplete, when the address cannot be used,
    or when nobody listens there within ``timeout`` seconds (ten minutes when None).
    """
    found = cluster(rank, world_size)
    rank, world_size, host, port = found.rank, found.size, found.address, found.port
    if not port:
        return dist.HashStore(), 0, 1, ""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else ""
    place = f"{host}:{port}/{attempt}"
    serves = rank == 0 and not agent
    limit = UNSEEN if timeout is None else timeout
    try:
        while True:
            store = _reach(host, port, world_size, limit, serves)
            if agent or serves or _is_of_new_run(store, rank, limit, PROCESS.runs_met[place]):
                break
    except RuntimeError as error:
        what, why = (
            (
                "listen on",
                "is the port taken by another program or a second process with RANK 0, or is the "
                "address another machine's?",
            )
            if serves
            else (
                "reach the store of rank 0 at",
                "has rank 0 been started, and is this its address?",
            )
        )
        raise CommunicationError(
            f"rank {rank} of {world_size} cannot {what} {host}:{port}: {one_line(error)}; {why} "
            "Set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there, on "
            "every rank"
        ) from error
    return store, rank, world_size, place


def _is_of_new_run(store: dist.Store, rank: int, limit: float, runs_met: int) -> bool:
    """Check whether rank 0 has opened ``store`` for this run, not for the one before.

    For the one before, wait until rank 0 has closed the store, then return False. Raises
    RuntimeError if it is still open after ``limit`` seconds.
    """
    with contextlib.suppress(dist.DistNetworkError):  # it is closed
        if store.add(f"meshwright/opened/{rank}", 1) == 1 or not runs_met:
            return True
        _log.warning("rank %d has left its run; rank 0 has not: does it call disconnect()?", rank)
        try:
            store.wait(["meshwright/closed"], timedelta(seconds=limit))  # nobody sets this key
        except dist.DistStoreError as error:
            raise RuntimeError("rank 0 has not left the run before: disconnect() there") from error
    return False


def _reach(host: str, port: int, world_size: int, limit: float, serves: bool) -> dist.TCPStore:
    """Connect to the store, or serve it; logs now and then that nobody listens yet."""
    begun = time.monotonic()
    while True:
        left = limit - (time.monotonic() - begun)
        seconds = timedelta(seconds=max(0.1, min(left, LINE_EVERY)))
        asked = time.monotonic()
        try:
            make = partial(dist.TCPStore, host, port, world_size, serves, seconds)
            return _within(2 * seconds.total_seconds() + 5, partial(make, wait_for_workers=False))
        except RuntimeError:
            now = time.monotonic()
            if serves or now - begun >= limit or now - asked < seconds.total_seconds() / 2:
                raise
            _log.warning("nobody listens on %s:%d after %.0f s", host, port, now - begun)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Have a thread do ``work``: no timeout of c10d's ends it if the store's host is stopped."""
    order: Future[T] = Future()
    threading.Thread(target=carry_out, args=(work, order), daemon=True).start()
    try:
        return order.result(seconds)
    except FutureTimeout:
        raise RuntimeError("its process does not answer (stopped, or cut off)") from None


def sign_in(
    monitor: FailureMonitor, entry: Mapping[str, Any], timeout: float | None
) -> list[Mapping[str, Any]]:
    """Publish this rank's ``entry``, and wait for the entries of all ranks, in rank order.

    Raises `CommunicationError` when ranks are missing after ``timeout`` seconds (ten minutes when
    None), and `RankFailedError` for one that came and ended.
    """
    ranks, rank, world_size = monitor.ranks, monitor.rank, monitor.world_size
    monitor.sign_in(entry)
    clock = monitor.clock
    begun, lines = clock.now(), 0
    limit = UNSEEN if timeout is None else timeout
    while not ranks.entries:
        until = min(limit, LINE_EVERY * (lines + 1))
        ranks.wait(max(0.0, begun + until - clock.now()))
        monitor.check()
        waited = clock.now() - begun
        if ranks.entries or waited < until:
            continue
        lines += 1
        if waited < limit and monitor.board.add(f"reports/roll/{lines}", 1) > 1:
            continue
        names = f"rank {', '.join(map(str, ranks.absent()))}"
        if waited >= limit:
            raise CommunicationError(
                f"rank {rank} waited {limit:g} s for {world_size} ranks: {names} did not come: "
                "start as many processes as WORLD_SIZE says, each with a RANK of its own, all with "
                "one MASTER_ADDR and MASTER_PORT"
            )
        _log.warning("%s is missing after %.0f s: the others wait", names, waited)
    return list(ranks.entries)
