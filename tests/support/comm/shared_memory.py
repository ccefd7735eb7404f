"""A group over shared memory, and its errors within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.comm import shared_memory
from meshwright.errors import CommunicationError

LARGE = 3_000_000


def join(timeout: float = 20.0) -> shared_memory.SharedMemoryGroup:
    dist.init_process_group("cpu:meshwright", timeout=timedelta(seconds=timeout))
    group = dist.group.WORLD
    assert isinstance(group, shared_memory.SharedMemoryGroup)
    return group


def error_of(operation: Callable[[], object], seconds: float) -> CommunicationError:
    """The error of ``operation``, which must come within ``seconds``."""
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        operation()
    assert time.monotonic() - start < seconds
    return caught.value
