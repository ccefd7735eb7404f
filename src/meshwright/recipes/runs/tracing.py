"""A trace of a run's last steps: what each rank computed and communicated, in one timeline."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.comm import Clock, Communicator, Timer, observe
from meshwright.report import write_chrome_trace
from meshwright.timeline import Timeline

__all__ = ["StepTrace"]


class StepTrace:
    """Measures steps and keeps the last ``keep`` of them; with 0 it measures nothing.

    The compute lane holds what the trainable names: forward, backward, optimizer.
    """

    def __init__(self, device: torch.device, *, keep: int) -> None:
        self._timer = Timer(Clock(device))
        self._steps: deque[Timeline] = deque(maxlen=keep)

    @contextlib.contextmanager
    def step(self, rank: int) -> Iterator[None]:
        """Measure the block as one step."""
        if not self._steps.maxlen:
            yield
            return
        with observe(self._timer):
            yield
        self._steps.append(self._timer.timeline(rank))
        self._timer.clear()

    def write(self, path: Path, communicator: Communicator) -> Path | None:
        """Join the timelines of all ranks and let rank 0 write them; ``None`` if nothing was kept.

        All ranks call it together.
        """
        mine = Timeline().merge(self._steps)
        answers = communicator.gather_bytes(mine.to_json().encode(), label="timelines")
        if not self._steps:
            return None
        if communicator.rank == 0:
            write_chrome_trace(
                Timeline().merge(Timeline.from_json(answer.decode()) for answer in answers), path
            )
        return path
