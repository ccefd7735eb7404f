"""Waits for other ranks outside of our own operations: calls of `torch.distributed`, and joining.

Nothing is known of the group or the operation, only that this rank waits. All ranks of the run may
have a part in it; who waits too has done theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.comm.failures.attendance import Answers
from meshwright.comm.failures.failure import FailureMonitor
from meshwright.comm.failures.waiting import Watch
from meshwright.comm.groups.registry import PROCESS

__all__ = ["OutsideCall", "watched"]


class OutsideCall:
    """A call of c10d's own, as a `Watch` sees it."""

    lacks = "is busy"

    def __init__(self, monitor: FailureMonitor, what: str) -> None:
        self._what = what
        self.ranks = [rank for rank in range(monitor.world_size) if rank != monitor.rank]

    def describe(self) -> str:
        """Name it in one phrase."""
        return self._what

    def topic(self, answers: Answers) -> str:
        """Name it by the first rank that waits, which is the same for all that do."""
        waiting = {r: answer["waiting"] for r, answer in answers.items() if answer["waiting"]}
        first = min(waiting, default=-1)
        return f"outside/{first}/{waiting.get(first, {}).get('number')}"

    def has_come(self, rank: int, answer: Mapping[str, Any]) -> bool:
        """Tell whether ``rank`` waits, too."""
        return bool(answer["waiting"])

    def differences(self, answers: Answers) -> list[str]:
        """Say nothing: what other ranks wait in may be something else."""
        return []

    def last_of(self, answer: Mapping[str, Any]) -> str:
        """Say nothing more of where a rank is."""
        return ""


@contextlib.contextmanager
def watched(what: str) -> Iterator[Callable[[], object]]:
    """Watch over a wait in the block, which calls what it is given now and then; that may raise.

    Nothing happens where nobody watches the run.
    """
    monitor = PROCESS.monitor
    if monitor is None:
        yield lambda: None
        return
    with Watch(monitor, OutsideCall(monitor, what), monitor.limit) as watch:
        yield watch.look
