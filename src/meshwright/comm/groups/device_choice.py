"""Chooses the backend and each rank's device, once, from the entries of all ranks.

Every rank publishes the requested backend and the devices it sees; all choose by one function:

=========================  ========================================  =============================
requested                  the ranks                                 backend
=========================  ========================================  =============================
nothing                    every rank sees a GPU of its own          ``cpu:gloo,cuda:nccl``
nothing                    a rank sees none, or two see the same     as for CPUs, with a warning
nothing, no GPU; "shm"     two ranks share a host                    shared memory, group by group
nothing, no GPU; "shm"     ranks cannot share memory                 ``gloo``
"gloo"                     any                                       ``gloo``, for tensors of CPUs
"nccl", "cpu:gloo,cuda:x"  every rank sees a GPU                     as asked, on those GPUs
=========================  ========================================  =============================

A rank's GPU is its local rank modulo the number of devices it sees: one of all that the host has,
or the only one that its launcher makes visible.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.comm.streams import is_host
from meshwright.environment import local_rank
from meshwright.errors import CommunicationError
from meshwright.torch_internals.distributed import device_types_of

ON_CPUS = ("gloo", "shm")
"""Names that mean ranks of CPUs."""

VARIABLE = "MESHWRIGHT_CPU_BACKEND"
"""The environment variable that names one of `ON_CPUS` where nothing is asked for."""

Roll = Sequence[Mapping[str, Any]]
"""The entries of all ranks, in their order; see `own_entry`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The backend of a world, and the device of each of its ranks."""

    backend: str
    """c10d's name."""
    devices: tuple[int | None, ...]
    """The index of each rank's GPU among those that it sees; None for a CPU rank."""
    is_bound: bool = False
    """True where c10d is given the device, because each rank has its own and NCCL moves data."""
    notes: tuple[tuple[int, str], ...] = ()
    """Lines for one rank to log, with their levels."""


def own_entry(asked: str | None, *, chosen: int | None = None) -> dict[str, Any]:
    """Describe this rank for `choose`: its host, its devices, and the requested backend.

    ``chosen`` is a device that the user has chosen; None takes the current one, unless it is the
    first, which is current by default.
    """
    unsupported = shared_memory.unsupported()
    devices = _visible(is_named=asked not in ON_CPUS)
    if chosen is None and devices and torch.cuda.is_initialized():
        chosen = torch.cuda.current_device() or None
    local = local_rank()
    if devices and (chosen is not None or local is not None):
        # Every rank reads the entries of all, so only what the choice needs is published.
        own = _own(chosen, local, len(devices))
        devices = [name if index == own else "" for index, name in enumerate(devices)]
    return {
        "host": socket.gethostname(),
        "place": "" if unsupported else _digest(shared_memory.host_identity()),
        "unsupported": unsupported,
        "asked": asked or "",
        "variable": os.environ.get(VARIABLE, ""),
        "local": local,
        "devices": devices,
        "chosen": chosen,
        "nccl": dist.is_nccl_available(),
    }


def _visible(*, is_named: bool) -> list[str]:
    """List digests of the GPUs' unique ids, short because every rank reads those of all.

    NCCL treats ranks with different ``NCCL_HOSTID`` as on different hosts, between which it also
    moves tensors of one GPU. Empty texts unless ``is_named``: counting devices does not start the
    driver, which forked CPU ranks do not need.
    """
    if not is_named:
        return [""] * torch.cuda.device_count()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    host = os.environ.get("NCCL_HOSTID", "")
    uuids = (torch.cuda.get_device_properties(index).uuid for index in range(count))
    return [_digest(f"{uuid} {host}") for uuid in uuids]


def _digest(text: str) -> str:
    """Shorten ``text`` to a digest that is unique among some thousand ranks."""
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def choose(roll: Roll) -> Choice:
    """Choose from the ``roll`` of all ranks. Raises the same error on all of them.

    `CommunicationError` if ranks differ or the requested backend cannot be used, ValueError for an
    unknown name in ``MESHWRIGHT_CPU_BACKEND``.
    """
    asked = _alike(roll, "asked", "the backend that connect() was asked for")
    variable = _alike(roll, "variable", VARIABLE)
    if variable not in ("", *ON_CPUS):
        raise ValueError(f"{VARIABLE}: expected gloo or shm, found {variable!r}")
    if asked and asked not in ON_CPUS:
        return _as_asked(asked, roll)
    devices = _devices(roll)
    why = _no_nccl(asked, roll, devices)
    if not why and any(entry["devices"] for entry in roll):
        return Choice(backend="cpu:gloo,cuda:nccl", devices=devices, is_bound=True)
    notes = [(logging.WARNING, f"the ranks compute on CPUs, without NCCL: {why}")] if why else []
    wanted = asked or variable
    reason = "" if wanted == "gloo" else _no_shared_memory(roll)
    if reason:
        level = logging.WARNING if wanted == "shm" else logging.INFO
        notes.append((level, f"{reason}: the ranks communicate through Gloo"))
    by_gloo = wanted == "gloo" or reason
    backend = "gloo" if by_gloo else f"cpu:{shared_memory.BACKEND}"
    return Choice(backend=backend, devices=(None,) * len(roll), notes=tuple(notes))


def device_of(group: dist.ProcessGroup, world: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors ``group`` moves, the host if it has no other.

    Gloo moves GPU tensors only when requested by name. The GPU is the one that the group, or else
    the ``world``, is bound to, otherwise the current one. In a process that has not used CUDA yet,
    the GPU of its local rank becomes current first.
    """
    others = [device for device in device_types_of(group) if not is_host(device)]
    if torch.device("cuda") not in others:
        return others[0] if others else torch.device("cpu")
    if dist.get_backend(group) == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    bound = group.bound_device_id or world.bound_device_id
    local = local_rank()
    if bound is None and local is not None and not torch.cuda.is_initialized():
        torch.cuda.set_device(local % torch.cuda.device_count())
    return bound or torch.device("cuda", torch.cuda.current_device())


def require_own_devices(roll: Roll) -> None:
    """Raise `CommunicationError` on all ranks if two ranks have the same GPU."""
    shared = _shared(roll, _devices(roll))
    if shared:
        raise CommunicationError(
            f"NCCL needs a GPU for each rank, found {shared}: call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before '
            "init_process_group, or give it device_id"
        )


def _as_asked(asked: str, roll: Roll) -> Choice:
    """Return the requested backend, on GPUs if it moves their tensors."""
    parts = asked.split(",")
    by_nccl = "nccl" in parts or "cuda:nccl" in parts
    if not by_nccl and not any(part.startswith("cuda:") for part in parts):
        return Choice(backend=asked, devices=(None,) * len(roll))
    devices = _devices(roll)
    if None in devices:
        blind = devices.index(None)
        raise CommunicationError(
            f"backend {asked!r} was asked for, which needs a GPU on every rank, found none on rank "
            f"{blind} (host {roll[blind]['host']}): is CUDA_VISIBLE_DEVICES empty there? "
            'connect("gloo") runs the ranks on CPUs'
        )
    shared = _shared(roll, devices) if by_nccl else ""
    if shared:
        raise CommunicationError(
            f"backend {asked!r} was asked for, which needs a GPU for each rank, found {shared}: "
            "start as many ranks on a host as it has GPUs, or ask for 'cpu:gloo,cuda:gloo'"
        )
    return Choice(backend=asked, devices=devices, is_bound=by_nccl)


def _no_nccl(asked: str, roll: Roll, devices: Sequence[int | None]) -> str:
    """Explain why ranks that see GPUs do not use NCCL; empty if they can, or if none sees a GPU."""
    sighted = next((rank for rank, entry in enumerate(roll) if entry["devices"]), None)
    if sighted is None:
        return ""
    count = len(roll[sighted]["devices"])
    sees = f"rank {sighted} sees {count} GPU{'s' if count > 1 else ''}"
    if asked:
        return (
            f"{asked!r} was asked for, and {sees} (connect() uses them, and "
            "connect('cpu:gloo,cuda:gloo') moves GPU tensors through Gloo)"
        )
    if None in devices:
        blind = devices.index(None)
        return f"rank {blind} (host {roll[blind]['host']}) sees no GPU, and {sees}"
    lacking = next((rank for rank, entry in enumerate(roll) if not entry["nccl"]), None)
    if lacking is not None:
        return f"torch has no NCCL on rank {lacking}, and {sees}"
    shared = _shared(roll, devices)
    return shared and f"{shared}; start as many ranks on a host as it has GPUs"


def _devices(roll: Roll) -> tuple[int | None, ...]:
    """List each rank's GPU index among those that it sees; None for a rank without any."""
    hosts = [entry["host"] for entry in roll]
    found: list[int | None] = []
    for rank, entry in enumerate(roll):
        local, count = entry["local"], len(entry["devices"])
        if local is None:
            local = hosts[:rank].count(hosts[rank])
        found.append(_own(entry["chosen"], local, count) if count else None)
    return tuple(found)


def _own(chosen: int | None, local: int | None, count: int) -> int:
    return (local or 0) % count if chosen is None else chosen


def _shared(roll: Roll, devices: Sequence[int | None]) -> str:
    """Name the first two ranks with the same GPU; empty if each has its own."""
    first: dict[str, int] = {}
    for rank, (entry, device) in enumerate(zip(roll, devices, strict=True)):
        if device is None:
            continue
        other = first.setdefault(entry["devices"][device], rank)
        if other != rank:
            count = len(entry["devices"])
            return (
                f"ranks {other} and {rank} on the same GPU (host {entry['host']}, number {device} "
                f"of the {count} that rank {rank} sees)"
            )
    return ""


def _alike(roll: Roll, name: str, what: str) -> str:
    """Return the common value under ``name``. Raises `CommunicationError` if ranks differ."""
    values = [str(entry[name]) for entry in roll]
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise CommunicationError(
            f"expected {what} to be the same on every rank, found {values[0]!r} on rank 0 and "
            f"{values[other]!r} on rank {other}"
        )
    return values[0]


def _no_shared_memory(roll: Roll) -> str:
    """Explain, equally on all ranks, why no two can share memory; empty when some can."""
    for rank, entry in enumerate(roll):
        if entry["unsupported"]:
            return f"rank {rank}: {entry['unsupported']}"
    places = [entry["place"] for entry in roll]
    if len(places) > 1 and len(set(places)) == len(places):
        return f"the {len(places)} ranks are on as many hosts"
    return ""
