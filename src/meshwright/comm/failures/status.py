"""Rank status: how a rank answers a roll call, and reads the answers of others."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import meshwright
from meshwright.comm.groups.registry import PROCESS

if TYPE_CHECKING:
    from meshwright.comm.collectives import Communicator

LIBRARIES = (
    os.path.dirname(os.path.abspath(meshwright.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(dist.__file__)).removesuffix("distributed"),
)
"""The folders of Meshwright and of torch: no line of theirs is the user's."""
_TESTING = os.path.join(LIBRARIES[0], "testing") + os.sep
_COMMUNICATES = (LIBRARIES[0], os.path.join(LIBRARIES[1], "distributed") + os.sep)
ENGINE = os.path.join(LIBRARIES[1], "autograd", "graph.py")
"""The file that waits for autograd's engine."""
_PYTHON = os.path.dirname(os.__file__) + os.sep
_IDLE = tuple(
    os.path.join(_PYTHON, *path)
    for path in (
        ("threading.py",),
        ("queue.py",),
        ("selectors.py",),
        ("multiprocessing", "connection.py"),
        ("concurrent", "futures", "thread.py"),
    )
)
"""Files in which threads wait for work."""

LONGEST_ERROR, HEAD = 600, 200
"""Characters of an error that are shown, and how many of them from its beginning."""


def own_state() -> dict[str, Any]:
    """Describe this process: phase, the user's line, and its last operations."""
    # In no variable here, whose own frame is one of these: the circle would keep what all hold.
    return _state_at(sys._current_frames())


def _state_at(frames: Mapping[int, FrameType]) -> dict[str, Any]:
    frame = frames.get(threading.main_thread().ident or 0)
    hook = hook_frame(frames)
    line = line_of(frame)
    now = time.monotonic()
    groups = {}
    for communicator in _channels():
        groups[communicator.name] = {
            "axis": communicator.axis,
            "counts": dict(communicator.counts),
            "last": [
                {"sequence": i.sequence, "kind": i.kind, "label": i.label}
                for i in list(communicator.issued)
            ],
        }
    return {
        "phase": phase_text(),
        "line": line if hook is None else f"{line}, which waits for a hook at {line_of(hook)}",
        "compiling": _is_compiling(frame) or _is_compiling(hook),
        "excused": any(record.excused_until > now for record in list(PROCESS.phases)),
        "alone": any(record.excused_until == math.inf for record in list(PROCESS.phases)),
        "threads": _has_another_thread(frames),
        "groups": groups,
    }


def _has_another_thread(frames: Mapping[int, FrameType]) -> bool:
    """Whether a thread other than the main one may issue what other ranks wait for.

    Such a thread is running, has issued operations before, or is in a call of this library or of
    `torch.distributed`. It may make progress while the main thread waits.
    """
    for thread in threading.enumerate():
        is_ours = thread.name.startswith("meshwright-") or isinstance(
            thread, threading._DummyThread
        )
        if thread is threading.main_thread() or is_ours:
            continue
        found = [frame.f_code.co_filename for frame in _frames(frames.get(thread.ident or 0))]
        if found and not found[0].endswith(_IDLE):
            return True  # at work: it may issue something next
        files = set(found)
        # The thread of a simulated device runs what the main thread has issued.
        is_inside = any(f.startswith(_COMMUNICATES) and not f.startswith(_TESTING) for f in files)
        if is_inside or thread.ident in PROCESS.issuers:
            return True
    return False


def _channels() -> list[Communicator]:
    return [each for c in list(PROCESS.communicators.values()) for each in c.channels]


_OF_AN_ANSWER = {
    "phase": str,
    "line": str,
    "compiling": bool,
    "excused": bool,
    "alone": bool,
    "leaving": bool,
    "threads": bool,
    "waiting": dict,
    "groups": dict,
    "described": dict,
    "seen": dict,
}
_OF_A_WAIT = {"what": str, "number": int, "need": dict}
_OF_A_NEED: Mapping[str, type | tuple[type, ...]] = {
    "ranks": (list, type(None)),
    "channel": str,
    "key": str,
    "number": int,
    "place": str,
}


def answer_of(text: str | None) -> Mapping[str, Any] | None:
    """Read a rank's answer to a roll call; None if it is malformed."""
    answer = object_of(text, _OF_AN_ANSWER)
    if answer is None:
        return None
    waiting = answer["waiting"]
    if waiting and not (_has(waiting, _OF_A_WAIT) and _has(waiting["need"], _OF_A_NEED)):
        return None
    for group in answer["groups"].values():
        if not _has(group, {"counts": dict, "last": list}):
            return None
        if not all(isinstance(count, int) for count in group["counts"].values()):
            return None
        entry = {"sequence": int, "kind": str, "label": str}
        if not all(_has(each, entry) for each in group["last"]):
            return None
    return answer


def object_of(
    text: str | None, keys: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any] | None:
    """Read a JSON object with at least ``keys``, whose values have these types; otherwise None.

    Other programs may write to the store.
    """
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if _has(found, keys) else None


def _has(found: object, keys: Mapping[str, type | tuple[type, ...]]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(k), t) for k, t in keys.items())


def source_line(error: BaseException) -> str:
    """Name the user's line that led to ``error``: the innermost frame outside the libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_the_users(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def line_of(frame: FrameType | None) -> str:
    """Name the user's line that ``frame`` is in, or was called from."""
    here = "" if frame is None else _place_of(frame)
    return users_line(frame) or here


def users_line(frame: FrameType | None) -> str:
    """Name the user's line that ``frame`` was called from; "" where there is none."""
    while frame is not None:
        if is_the_users(frame.f_code.co_filename):
            return _place_of(frame)
        frame = frame.f_back
    return ""


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def hook_frame(frames: Mapping[int, FrameType]) -> FrameType | None:
    """Return the innermost frame of a backward hook among the ``frames`` of all threads.

    Autograd runs hooks of a device's gradients in a thread of its own, for which the main thread
    waits. Python did not start that thread, and sees it only while it runs a hook.
    """
    main = frames.get(threading.main_thread().ident or 0)
    if main is None or main.f_code.co_filename != ENGINE:
        return None
    ours = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    return next((frame for thread, frame in frames.items() if thread not in ours), None)


@functools.lru_cache(maxsize=1024)
def is_the_users(file: str) -> bool:
    """Check whether ``file`` belongs to neither Python, nor torch, nor this library."""
    # Packages may be installed inside of Python's own folder.
    is_pythons = file.startswith(_PYTHON) and "-packages" not in file
    return not is_pythons and not file.startswith((*LIBRARIES, "<"))


def _is_compiling(frame: FrameType | None) -> bool:
    places = ("/torch/_dynamo/convert_frame", "/torch/_inductor/")
    return any(place in f.f_code.co_filename for f in _frames(frame) for place in places)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def phase_text() -> str:
    return " > ".join(str(record) for record in list(PROCESS.phases))


def last_operation() -> str:
    """Name the last operation that this rank has issued."""
    last = [channel.issued[-1] for channel in _channels() if channel.issued]
    return str(last[-1]) if last else ""


def one_line(error: BaseException) -> str:
    """Return type and text of ``error`` in one bounded line.

    A long text keeps its end, too: an error of a worker process has its cause there.
    """
    # c10d appends a C++ stack, which says nothing of the run.
    text = " ".join(str(error).split("\nException raised from", 1)[0].split())
    if len(text) > LONGEST_ERROR:
        text = f"{text[:HEAD]} [...] {text[HEAD - LONGEST_ERROR :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
