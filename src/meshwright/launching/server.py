"""The clean process that every rank is forked from: torch is loaded, one thread, nothing used.

It is started as a fresh interpreter, never forked out of the test process with its threads. It runs
nothing itself: for each call it forks a supervisor, which forks the ranks.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import select
import socket
import sys
import weakref
from collections.abc import Iterable
from typing import cast

from meshwright.launching import supervisor, wire
from meshwright.torch_internals.tracing import COMPILER_MODULES

CONTROL_BYTES = 1 << 16
"""Bound on the list of modules that comes with a call."""


_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21


def main(control: int) -> None:
    """Serve calls until the other end of the socket ``control`` is closed."""
    step: supervisor.Step | int = functools.partial(_serve, socket.socket(fileno=control))
    while not isinstance(step, int):
        step = step()
    sys.exit(step)


def _serve(control: socket.socket) -> supervisor.Step | int:
    pending = list(reversed(COMPILER_MODULES))
    while True:
        while pending and not select.select([control], [], [], 0)[0]:
            _load([pending.pop()])
        data, descriptors, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1)
        if not descriptors:
            return 0
        _reap()
        _load(cast("list[str]", wire.unpack(data)))
        call = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            return functools.partial(supervisor.supervise, call)
        call.close()


def _load(names: Iterable[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # the rank that needs it raises it again, and is heard
    if missing:
        _freeze()


def _freeze() -> None:
    """Keep all that is loaded as it is: whatever a rank touches of it, it has to copy."""
    for finalizer in list(weakref.finalize._registry):  # pyrefly: ignore[missing-attribute]
        finalizer.atexit = False  # torch would take its libraries apart, in 30 ms a rank
    gc.collect()
    gc.freeze()
    _collapse_heap()


def _collapse_heap() -> None:
    """Put what is loaded on huge pages, where the kernel can: a fork takes a third of the time."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps]
    for span, rights, _, _, inode, *name in rows:
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            # One at a time: the kernel stops at the first that it cannot move.
            first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            for page in range(first, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
