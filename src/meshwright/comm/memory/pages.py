"""Pages of this process that move between tensors instead of being freed and allocated again.

The kernel clears a page before it hands it out, which costs more than filling it; on a virtual
machine many times more. C's allocator returns large blocks to the kernel, or fragments them. So
each buffer that is freed and restored at every unit of every step (`reusable_storage`) has a
window: permanent addresses, with pages only while in use.

::

    home    addresses where pages are kept while nobody uses them; each has its own
    window  addresses of one buffer; unreadable while it has no pages

Pages move from home to window and back by ``mremap``, which moves page tables, not data: some 25
microseconds for 16 MiB there and back.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

BLOCK = 2 << 20
"""Bytes that one table of pages describes: what is moved in one piece."""
KEPT_SECONDS = 60.0
"""How long pages that no window has had are kept."""

_NOTHING, _READ_WRITE = 0, 3
_PRIVATE_ANONYMOUS_UNRESERVED = 0x2 | 0x20 | 0x4000
_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_FAILED = ctypes.c_void_p(-1).value


class _Kernel:
    """The system calls by which addresses get and lose pages."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap, self._munmap = libc.mmap, libc.munmap
        self._mremap, self._mprotect = libc.mremap, libc.mprotect
        self._mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
        self._munmap.argtypes = (pointer, size)
        self._mremap.argtypes = (pointer, size, size, number, pointer)
        self._mprotect.argtypes = (pointer, size, number)
        self._mmap.restype = self._mremap.restype = pointer

    def reserve(self, nbytes: int, protection: int) -> int:
        """Reserve ``nbytes`` of new addresses, aligned to a block."""
        found = self._mmap(None, nbytes + BLOCK, protection, _PRIVATE_ANONYMOUS_UNRESERVED, -1, 0)
        if found == _FAILED:
            raise MemoryError(f"no {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        start = -(-found // BLOCK) * BLOCK
        if start > found:
            self._munmap(found, start - found)
        if start - found < BLOCK:
            self._munmap(start + nbytes, BLOCK - (start - found))
        return start

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move pages; the addresses they leave stay reserved, and empty."""
        moved = self._mremap(source, nbytes, nbytes, _MAYMOVE_FIXED_DONTUNMAP, target)
        if moved != target:
            raise MemoryError(f"{nbytes} bytes cannot be moved: {os.strerror(ctypes.get_errno())}")

    def seal(self, start: int, nbytes: int) -> None:
        """Make any access to these addresses crash the process, as one to freed memory should."""
        self._mprotect(start, nbytes, _NOTHING)

    def give_back(self, start: int, nbytes: int) -> None:
        """Release these addresses and their pages."""
        self._munmap(start, nbytes)


@dataclass(slots=True)
class _Extent:
    """Neighboring pages that move together."""

    home: int
    nbytes: int
    used: float = 0.0
    """The time when a window last had them, on the monotonic clock."""

    def go_home(self, kernel: _Kernel, source: int, now: float) -> None:
        """Move the pages from a window, where they are at ``source``, back home."""
        kernel.move(source, self.home, self.nbytes)
        self.used = now


@dataclass(slots=True, eq=False)
class Window:
    """The addresses of a buffer, and the pages that are there now."""

    start: int
    nbytes: int
    extents: list[_Extent] = field(default_factory=list)


class PagePool:
    """Pages, at home or in windows; never more than the windows once held together.

    Pages unused for a minute are returned to the kernel when others come home, and all of them with
    the last window.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a window may be closed by the collector at any point
        self._free: deque[_Extent] = deque()
        """At home, those that came last at the right end."""
        self._windows = 0
        self.empty_windows: set[int] = set()
        """Where windows without pages begin."""
        self._is_moving = False
        """True while `fill` or `empty` runs, within which the collector closes no window."""
        self._to_close: list[Window] = []
        self._kernel: _Kernel | None = None
        self._works: bool | None = None

    @property
    def is_available(self) -> bool:
        """True where pages can be moved: on Linux from 5.7 on."""
        if self._works is None:
            self._works = self._try()
        return self._works

    def open(self, nbytes: int) -> Window:
        """Reserve addresses of at least ``nbytes``, without pages."""
        kernel = self._ready()
        with self._lock:
            size = -(-nbytes // BLOCK) * BLOCK
            window = Window(kernel.reserve(size, _NOTHING), size)
            self._windows += 1
            self.empty_windows.add(window.start)
            return window

    def close(self, window: Window) -> None:
        """Release the addresses of ``window``; its pages go home."""
        with self._lock:
            self._to_close.append(window)
            if not self._is_moving:
                self._close_waiting()

    def fill(self, window: Window) -> None:
        """Give ``window`` pages with arbitrary contents; does nothing if it has some."""
        if sum([extent.nbytes for extent in window.extents]) == window.nbytes:
            return
        with self._lock:
            self._is_moving = True
            try:
                self._bring(window)
            finally:
                self._is_moving = False
                self._close_waiting()

    def empty(self, window: Window) -> None:
        """Move the pages of ``window`` home."""
        if not window.extents:
            return
        with self._lock:
            self._is_moving = True
            try:
                self._take_home(window)
            finally:
                self._is_moving = False
                self._close_waiting()

    @property
    def nbytes(self) -> int:
        """Bytes at home."""
        with self._lock:
            return sum(extent.nbytes for extent in self._free)

    # ------------------------------------------------------------------ with the lock held

    def _take(self, nbytes: int) -> _Extent:
        """Take at most ``nbytes`` of pages from home; new ones when there are none."""
        free = self._free
        if not free:
            return _Extent(self._ready().reserve(nbytes, _READ_WRITE), nbytes)
        index = next(
            (i for i in range(len(free) - 1, -1, -1) if free[i].nbytes == nbytes), len(free) - 1
        )
        extent = free[index]
        if extent.nbytes <= nbytes:
            del free[index]
            return extent
        rest = _Extent(extent.home + nbytes, extent.nbytes - nbytes, extent.used)
        free[index] = rest
        return _Extent(extent.home, nbytes)

    def _take_home(self, window: Window) -> None:
        kernel, now = self._ready(), time.monotonic()
        at = window.start
        for extent in window.extents:
            extent.go_home(kernel, at, now)
            at += extent.nbytes
        self._free.extend(window.extents)
        window.extents.clear()
        self.empty_windows.add(window.start)
        # The addresses stay mapped: unsealed, they would read as zeros.
        kernel.seal(window.start, window.nbytes)
        self._trim(now - KEPT_SECONDS)

    def _bring(self, window: Window) -> None:
        at = sum([extent.nbytes for extent in window.extents])
        while at < window.nbytes:
            extent = self._take(window.nbytes - at)
            try:
                self._ready().move(extent.home, window.start + at, extent.nbytes)
            except MemoryError:
                self._free.append(extent)
                raise
            window.extents.append(extent)
            at += extent.nbytes
        self.empty_windows.discard(window.start)

    def _close_waiting(self) -> None:
        while self._to_close:
            self._is_moving = True
            try:
                self._close(self._to_close.pop())
            finally:
                self._is_moving = False

    def _close(self, window: Window) -> None:
        if window.extents:
            self._take_home(window)
        self._ready().give_back(window.start, window.nbytes)
        self.empty_windows.discard(window.start)
        self._windows -= 1
        if not self._windows:
            self._trim(float("inf"))

    def _trim(self, before: float) -> None:
        """Return pages to the kernel that were last used before that time."""
        free = self._free
        while free and free[0].used < before:
            extent = free.popleft()
            self._ready().give_back(extent.home, extent.nbytes)

    def _ready(self) -> _Kernel:
        if self._kernel is None:
            self._kernel = _Kernel()
        return self._kernel

    def _try(self) -> bool:
        if sys.platform != "linux":
            return False
        try:
            window = self.open(1)
            try:
                self.fill(window)
            finally:
                self.close(window)
        except (MemoryError, AttributeError):
            return False
        return True
