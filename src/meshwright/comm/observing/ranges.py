"""Ranges of collectives in the traces of `torch.profiler`, for a collective that begins under it.

::

    meshwright::all_reduce reduce bucket 0 on axis replicate           its launch
    meshwright::all_reduce reduce bucket 0 on axis replicate (wait)    whoever waits for it

What the backend does lies inside: ``gloo:all_reduce``, ``nccl:all_reduce``, and on shared memory
``meshwright:all_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.profiler import record_function

from meshwright.comm.pending import Launched, TransferWaiter, Work


class _InRange:
    """A work whose waits are a range."""

    __slots__ = ("_name", "_work")

    def __init__(self, work: Work, name: str) -> None:
        self._work = work
        self._name = name

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> object:
        with record_function(self._name):
            return self._work.wait() if timeout is None else self._work.wait(timeout)


def in_ranges(launch: Callable[[Any], Launched], name: str) -> Callable[[Any], Launched]:
    """``launch`` in a range ``name``; each wait for what it starts is one, too."""

    def shown(group: Any) -> Launched:  # noqa: ANN401 - c10d's group
        with record_function(name):
            works, finish = launch(group)
        # Transfers are waited for in a thread of their own, which knows them by their class.
        return [
            work if isinstance(work, TransferWaiter) else _InRange(work, f"{name} (wait)")
            for work in works
        ], finish

    return shown
