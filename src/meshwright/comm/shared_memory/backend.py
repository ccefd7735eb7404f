"""The c10d backend ``meshwright``, as `torch.distributed` learns of it.

``register()`` makes it known to `torch.distributed`; then
``init_process_group("cpu:meshwright")``, subgroups, `DeviceMesh`, functional collectives and
DTensor work on it. All ranks of a group must be processes of one user on one host.
"""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from meshwright.comm.shared_memory.arena import SharedTensors, unsupported
from meshwright.comm.shared_memory.group import BACKEND, GroupOptions, SharedMemoryGroup
from meshwright.errors import CommunicationError

__all__ = ["allocate", "is_supported", "register"]


class _Host:
    """What the groups of this process share: the tensors in shared memory."""

    def __init__(self) -> None:
        self.tensors = SharedTensors()
        self._groups: dict[int, SharedMemoryGroup] = {}
        self.crowd = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """The most ranks on this host that are known of."""

    def create(self, options: GroupOptions, backend_options: object) -> SharedMemoryGroup:
        """Make a group: the creator that c10d calls on each of its ranks."""
        reason = unsupported()
        if reason:
            raise CommunicationError(f"{reason}. Use the gloo backend")
        self.crowd = max(self.crowd, options.group_size)
        group = SharedMemoryGroup(options, self.tensors, self.crowd, self._forget)
        self._groups[id(group)] = group
        return group

    def _forget(self, group: SharedMemoryGroup) -> None:
        self._groups.pop(id(group), None)

    def close(self) -> None:
        """Leave all groups, when the interpreter ends."""
        for group in list(self._groups.values()):
            group.shutdown()


def is_supported() -> str:
    """Why the backend cannot be used by this process; empty when it can."""
    return unsupported()


def register() -> None:
    """Make the backend known to `torch.distributed`. Further calls do nothing."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    host = _Host()
    atexit.register(host.close)
    dist.Backend.register_backend(BACKEND, host.create, extended_api=True, devices=["cpu"])


def allocate(group: dist.ProcessGroup | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-D tensor that the ranks of every group gather and reduce in place.

    ``group`` is any group of this backend. On others, and on None, it is an ordinary tensor. A
    process forked from this one sees the same memory: it must not write to it.
    """
    if isinstance(group, SharedMemoryGroup):
        return group.tensors.allocate(numel, dtype)
    return torch.empty(numel, dtype=dtype)
