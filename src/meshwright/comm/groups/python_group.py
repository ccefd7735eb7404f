"""Base of process groups written in Python: what c10d needs from them apart from operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshwright.torch_internals.distributed import living_groups

ProcessGroup: Any = dist.ProcessGroup
"""Untyped: its stubs fix parameter names that differ from one torch to the next."""


class GroupOptions(Protocol):
    """The options that c10d gives a backend for the group to be made."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


class PythonGroup(ProcessGroup):
    """The part of a process group that does not depend on how data moves."""

    def __init__(self, options: GroupOptions, backend: str) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._name, self._description = str(options.group_id), "undefined"
        self._backend = backend

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return self._backend

    getBackendName = name  # noqa: N815

    def _get_backend_name(self) -> str:
        # torch's ShardedTensor asks it for the device of a rank without a part: a GPU, unless the
        # backend is Gloo.
        return "gloo"

    @property
    def host_backend(self) -> str:
        return self._backend

    @property
    def _device_types(self) -> Sequence[torch.device]:
        # c10d knows those of its own backends. What torch 2.15 attaches to a group that it has just
        # made looks for a backend of that kind, unless there is no device yet.
        return (torch.device("cpu"),) if self in living_groups() else ()

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc


class CpuTransport:
    """The part of c10d's ``Backend`` that is looked up by name, with nothing that is optional.

    c10d's ``_set_pg_timeout`` skips backends that are neither Gloo's nor NCCL's class, with a
    warning. So this claims to be of Gloo's class: a timeout that seems set but is not would be
    worse.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, name: str, set_timeout: Callable[[timedelta], None]) -> None:
        self._name = name
        self._set_timeout = set_timeout

    @property
    def __class__(self) -> type:
        return dist.ProcessGroupGloo

    def name(self) -> str:
        return self._name

    def supports_tensor_alloc(self, device: object) -> bool:
        """Return False: it has no allocator for plain tensors."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._set_timeout(timeout)
