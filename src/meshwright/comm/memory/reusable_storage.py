"""Reusable storage: 1-D tensors whose memory can be freed and restored while views stay valid.

Views that autograd has saved are valid again once the memory is restored. Reading or writing a
freed tensor, or a view of it, crashes the process (SIGSEGV).
"""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod

import torch

from meshwright.comm.groups.registry import PROCESS
from meshwright.comm.memory.pages import PagePool
from meshwright.comm.streams import is_host

LARGE = 1 << 20
"""Bytes from which a line on the CPU has pages of its own."""


class Line(ABC):
    """A 1-D tensor that has memory at first, and between `restore` and `free`."""

    tensor: torch.Tensor
    is_free: bool
    """True when it has no memory now."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory."""

    @abstractmethod
    def restore(self) -> None:
        """Allocate memory, uninitialized, unless it is there already."""


class _StorageLine(Line):
    """A line whose memory comes from the allocator of its device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.is_free = False  # noted, since of no elements the storage does not tell

    def free(self) -> None:
        self.is_free = True
        # What was shown to NumPy stays: torch lets nobody resize it any more.
        if self._storage.nbytes() and self._storage.resizable():
            self._storage.resize_(0)

    def restore(self) -> None:
        self.is_free = False
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)


class _PagedLine(Line):
    """A line with its own window, into which pages are moved."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: PagePool) -> None:
        nbytes = numel * dtype.itemsize
        self._pool = pool
        self._window = pool.open(nbytes)
        # The tensor's storage holds it: the window is closed with the last view, not with the line.
        memory = (ctypes.c_char * nbytes).from_address(self._window.start)
        closing = weakref.finalize(memory, pool.close, self._window)
        # At exit the tensor may still be in use: its window has to stay.
        closing.atexit = False  # pyrefly: ignore[missing-attribute]
        # An inference tensor could never be saved for a backward.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(memory, dtype=dtype)
        self.restore()

    def free(self) -> None:
        self.is_free = True
        self._pool.empty(self._window)

    def restore(self) -> None:
        self.is_free = False
        self._pool.fill(self._window)


def line_of(numel: int, dtype: torch.dtype, device: torch.device) -> Line:
    """Make a line of ``numel`` elements with uninitialized memory."""
    is_large = numel * dtype.itemsize >= LARGE
    if is_large and is_host(device) and PROCESS.pages.is_available:
        return _PagedLine(numel, dtype, PROCESS.pages)
    return _StorageLine(numel, dtype, device)
