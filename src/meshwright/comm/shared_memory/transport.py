"""The backend that c10d gets when it asks a group for that of a device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


class CpuTransport:
    """The part of c10d's ``Backend`` that is asked for by name, with nothing that is optional.

    c10d's ``_set_pg_timeout`` passes over what is neither Gloo's nor NCCL's class, with a warning
    and without effect. So this says that it is of Gloo's class: a timeout that seems set and is not
    would be worse.
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
        """Find the name of the backend."""
        return self._name

    def supports_tensor_alloc(self, device: object) -> bool:
        """Check for an allocator of its own for plain tensors."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._set_timeout(timeout)
