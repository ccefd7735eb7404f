"""The most memory that this process has at one time, and a model that is much larger than that."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

__all__ = ["BOUND", "COUNT", "TENSOR_BYTES", "Wide", "peak_growth"]

ROWS, COUNT = 1024, 12
TENSOR_BYTES = 4 * ROWS * ROWS
BOUND = 3 * TENSOR_BYTES
"""One that is read, one that is being let go, and what an allocator keeps; the whole are twelve."""


class Wide(nn.Module):
    """Twelve weights of 4 MiB."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        full = (torch.full((ROWS, ROWS), value) for _ in range(COUNT))
        self.rows = nn.ParameterList(full)


def peak_growth(action: Callable[[], object]) -> int:
    """Count the bytes by which the resident memory grows in ``action``, at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak of a process")
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
