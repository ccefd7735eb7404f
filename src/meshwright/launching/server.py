"""The clean process that every rank is forked from: torch is loaded, with a single thread.

It is a new interpreter, never forked from the caller, which has threads. It runs nothing itself:
for each call it forks a supervisor, which forks the ranks.
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
"""Limit on the bytes of the list of modules that comes with a call."""


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
            continue  # a rank that needs it raises the error again, where it is reported
    if missing:
        _freeze()


def _freeze() -> None:
    """Freeze loaded objects: a rank would have to copy each page that it touches."""
    for finalizer in list(weakref.finalize._registry):  # pyrefly: ignore[missing-attribute]
        finalizer.atexit = False  # torch would unload its libraries, 30 ms per rank
    gc.collect()
    gc.freeze()
    _collapse_heap()


def _collapse_heap() -> None:
    """Move loaded data to huge pages if the kernel can: a fork then takes a third of the time."""
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
