"""Calls of c10d's own that do not return, seen from outside by the stacks of threads.

Programs call `torch.distributed` beside us, and what they call may be replaced by them, so nothing
of it is wrapped. A thread is in such a call when its innermost frame stands

* in a file of `torch.distributed` or of our communication, or
* at a call of ``wait`` on what c10d has returned (``work.wait()`` has no frame of its own), or
* in autograd's engine, which waits for collectives that C++ has begun,

and the thread has not run since the last look: a loop of short calls is at the same place as well,
but runs in between. Waits of ours that are watched end by themselves, and are left alone.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm.failures.whereabouts import ENGINE, line_of

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_C10D = os.path.dirname(os.path.abspath(dist.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMUNICATES = (_C10D, _OURS, os.path.join(_TORCH, "nn", "parallel") + os.sep)
_READS_FILES = os.path.join(_C10D, "checkpoint") + os.sep
"""A part of `torch.distributed` in which a thread may stand still with a file."""
_GLUE = (_TORCH, "<")
"""Files between a caller and C++ that say nothing of what is called."""
_WRAPPERS = frozenset({"wrapper", "inner", "_fn", "fn"})

_WAITS = frozenset({"wait", "wait_tensor", "_wait_for_pending_works"})
"""Methods of C++ that return when an operation has ended."""

_SPURIOUS = 50e-6
"""CPU seconds between two looks in which no thread can come out of a call and into another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCall:
    """A call that has not returned."""

    number: int
    """Different for every call of this process."""
    what: str
    line: str
    """The user's line."""
    since: float
    """The first time that the thread was seen in it, on the monotonic clock."""

    def __str__(self) -> str:
        return f"{self.what}, called at {self.line}"


class _Place(NamedTuple):
    """The place at which a thread stands."""

    frames: tuple[object, ...] | None
    """Its innermost frames; None where they were not asked for."""
    work: float
    """The amount that it had run at the last look, as the system says."""
    since: float
    number: int


class CallWatch:
    """Finds the call that holds this process up, by the stacks of threads. For one thread alone."""

    def __init__(self, is_watched: Callable[[int], bool]) -> None:
        """``is_watched`` tells of a thread whether it is in a wait of ours that ends by itself."""
        self._is_watched = is_watched
        self._places: dict[int, _Place] = {}
        self._count = 0
        self.stands_still = False
        """True where the main thread has not run between the last two looks."""

    def look(self) -> StuckCall | None:
        """Return the call that holds the main thread up, if there is one.

        It may be made by another thread, when the main thread waits in C++ for that.
        """
        main = threading.main_thread()
        self.stands_still = self._is_still(main)
        if not self.stands_still:
            self._places = {k: v for k, v in self._places.items() if k == main.ident}
            return None
        others = [t for t in threading.enumerate() if not t.name.startswith("meshwright-")]
        for thread in [main, *(thread for thread in others if thread is not main)]:
            ident = thread.ident or 0
            if self._is_watched(ident) or (thread is not main and not self._is_still(thread)):
                continue
            frame = sys._current_frames().get(ident)
            what = None if frame is None else _communication(frame)
            if frame is not None and what is not None:
                place = self._places[ident]
                return StuckCall(
                    number=place.number, what=what, line=line_of(frame), since=place.since
                )
        return None

    def _is_still(self, thread: threading.Thread) -> bool:
        """Tell whether ``thread`` stands where it stood at the last look, and has not run since.

        Frames are asked for only where the main thread has not run: who holds one keeps its locals
        alive, and with them graphs and activations of a model that runs.
        """
        ident, is_main = thread.ident or 0, thread is threading.main_thread()
        work, before = _work_of(thread), self._places.get(ident)
        has_run = before is None or work - before.work >= (_SPURIOUS if is_main else 1.0)
        here = None if has_run and is_main else _position(ident)
        if before is not None and not has_run and before.frames in (None, here):
            self._places[ident] = before._replace(frames=here, work=work)
            return True
        self._count += 1
        self._places[ident] = _Place(here, work, time.monotonic(), self._count)
        return False


def _position(ident: int) -> tuple[object, ...] | None:
    """List the innermost frames of a thread and where they are, as numbers; None: it has ended."""
    frame = sys._current_frames().get(ident)
    here: list[object] = []
    while frame is not None and len(here) < 8:
        here += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(here) or None


def _work_of(thread: threading.Thread) -> float:
    """Count the CPU seconds of the main thread, or how often another one has gone to sleep."""
    if thread is threading.main_thread():
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        except (AttributeError, OSError):
            return 0.0
    try:  # the clock of a thread that has ended must not be asked for
        with open(f"/proc/self/task/{thread.native_id}/status", encoding="utf-8") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line)
        return float(rows["voluntary_ctxt_switches"])
    except (OSError, KeyError, ValueError):
        return 0.0


def _communication(frame: FrameType) -> str | None:
    """Name the communication that a still thread is in, by its innermost ``frame``; None: none."""
    inner: FrameType | None = frame
    while inner is not None:
        file = inner.f_code.co_filename
        if file.startswith(_COMMUNICATES):
            return None if file.startswith(_READS_FILES) else _public_name(inner)
        if file == ENGINE and not torch.cuda.is_initialized():
            return "a backward pass"
        if not file.startswith(_GLUE):
            name = _called(inner.f_code, inner.f_lasti)
            if "wait_tensor" in linecache.getline(file, inner.f_lineno):
                name = "wait_tensor"
            return f"{name} of torch.distributed" if name in _WAITS else None
        inner = inner.f_back
    return None


def _public_name(frame: FrameType) -> str:
    """Name the function by which users have come to ``frame``."""
    found, inner = frame, frame.f_back
    while inner is not None and inner.f_code.co_filename.startswith((*_COMMUNICATES, *_GLUE)):
        if inner.f_code.co_filename.startswith(_COMMUNICATES):
            found = found if inner.f_code.co_name in _WRAPPERS else inner
        inner = inner.f_back
    room = "meshwright.comm" if found.f_code.co_filename.startswith(_OURS) else "torch.distributed"
    return f"{found.f_code.co_name} of {room}"


@functools.lru_cache(maxsize=256)
def _called(code: CodeType, at: int) -> str:
    """Name the method or function that the instruction at offset ``at`` calls; "" for none.

    What is called has been loaded before, by an instruction whose text begins where the call's does
    and ends last.
    """
    done = [each for each in dis.get_instructions(code) if each.offset <= at]
    if not done or "CALL" not in done[-1].opname:
        return ""
    start = done[-1].positions
    name = ""
    for each in done:
        is_of_it = (
            start is not None and each.positions is not None and (each.positions[::2] == start[::2])
        )
        if is_of_it and each.opname.startswith("LOAD_"):
            name = str(each.argval)
    return name
