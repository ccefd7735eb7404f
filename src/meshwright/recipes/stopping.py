"""Stopping a run on request: SIGINT and SIGTERM finish the step, on all ranks the same one.

::

    signal on rank 1     |
    rank 0   step 7 ----------- agree -- step 8 ---------- agree: stop, save
    rank 1   step 7 --- flag -- agree -- step 8 ---------- agree: stop, save
                        the flag travels beside step 8, whose work hides it
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import torch

from meshwright.comm import Communicator, Pending

# A launcher and a terminal may both deliver the one signal a user sent.
_SAME_REQUEST_SECONDS = 0.5

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopRequest:
    """A catch of SIGINT and SIGTERM while it is entered; a second one ends the process at once.

    The ranks agree through one small all-reduce beside each step: ``begin`` issues it before the
    step's work, ``is_agreed`` waits for it afterwards.
    """

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._first: float | None = None
        self._previous: dict[signal.Signals, _Handler] = {}
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Tell the other ranks whether this one was asked to stop, without waiting for them."""
        flag = torch.tensor([int(self._first is not None)], dtype=torch.int32)
        flag = flag.to(self._communicator.device)
        self._pending = self._communicator.all_reduce(flag, reduction="max", label="stop request")

    def is_agreed(self) -> bool:
        """Check that any rank had been asked to stop at the last ``begin``; equal on all ranks."""
        if self._pending is None:
            return False
        flag, self._pending = self._pending.wait(), None
        return flag is not None and bool(flag.item())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {each: signal.signal(each, self._receive) for each in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
