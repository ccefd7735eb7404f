"""The c10d backend ``meshwright``, as `torch.distributed` learns of it.

The import of `meshwright.comm` makes it known to `torch.distributed`; then
``init_process_group("cpu:meshwright")``, subgroups, `DeviceMesh`, functional collectives and
DTensor work on it. Each group is looked at on its own: one whose ranks are processes of one user on
one host shares memory, any other is an ordinary Gloo group.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.comm.groups.python_group import GroupOptions
from meshwright.comm.shared_memory.arena import SharedTensors
from meshwright.comm.shared_memory.group import BACKEND, SharedMemoryGroup
from meshwright.comm.shared_memory.joining import ApartError, join
from meshwright.environment import local_size
from meshwright.torch_internals.distributed import add_backend, known_backends, number_operations

_log = logging.getLogger("meshwright")


class _Host:
    """The tensors in shared memory, which the groups of this process share."""

    def __init__(self) -> None:
        self.tensors = SharedTensors()
        self._groups: dict[int, SharedMemoryGroup] = {}
        self._known: dict[int, tuple[int, int]] = {}
        """Process id and start time of the ranks of this host that were met, by world number."""
        self.crowd = 1
        """The most ranks on this host that are known of."""

    def create(self, options: GroupOptions, backend_options: object) -> dist.ProcessGroup:
        """Make a group: the creator that c10d calls on each of its ranks."""
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
        """Leave all groups, when the interpreter ends."""
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
    """Make the backend known to `torch.distributed`. Further calls do nothing."""
    if BACKEND.upper() in known_backends():
        return
    host = _Host()
    atexit.register(host.close)
    dist.Backend.register_backend(BACKEND, host.create, extended_api=True, devices=["cpu"])


def allocate(group: dist.ProcessGroup | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized 1-D tensor that the ranks of every group gather and reduce in place.

    ``group`` is any group of this backend. On others, and on None, it is an ordinary tensor. A
    process forked from this one sees the same memory: it must not write to it.
    """
    if isinstance(group, SharedMemoryGroup):
        return group.tensors.allocate(numel, dtype)
    return torch.empty(numel, dtype=dtype, device="cpu")
