"""Reports each action of a step to observers of `comm` and to torch's profiler.

Compute starts when all its inputs are there, so that waiting does not count as work. A gather lasts
from its UNSHARD until the first compute that waits for it, a reduction until the end of the step.
The communicator reports transfers, under the texts of their actions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.profiler import record_function

from meshwright.comm import Clock, Mark, hears_actions, tell_ran
from meshwright.pipelining.stepping.program import Entry
from meshwright.schedule.actions import COMPUTE, REDUCE_GRAD, RESHARD, UNSHARD
from meshwright.torch_internals.autograd import is_profiled


class Listener:
    """Reports the actions of one step on one rank."""

    def __init__(self, clock: Clock, *, is_profiled: bool) -> None:
        self._clock = clock
        self._is_profiled = is_profiled
        self._gathers: dict[int, tuple[Entry, Mark]] = {}
        self._reductions: list[tuple[Entry, Mark]] = []

    @classmethod
    def attached(cls, clock: Clock) -> Listener | None:
        """Make a listener if an observer or the profiler is active, else None."""
        has_profiler = is_profiled()
        if has_profiler or hears_actions():
            return cls(clock, is_profiled=has_profiler)
        return None

    @contextlib.contextmanager
    def action(self, entry: Entry) -> Iterator[None]:
        """Report the block as the action of ``entry``."""
        start = self._clock.mark()
        if self._is_profiled:
            with record_function(f"PP:{entry.text}"):
                yield
        else:
            yield
        operation = entry.operation
        if operation in COMPUTE:
            tell_ran(entry.text, "compute", operation.value, start, self._clock.mark())
        elif operation is UNSHARD:
            self._gathers[entry.index] = entry, start
        elif operation is RESHARD:
            tell_ran(entry.text, "gather", operation.value, start, self._clock.mark())
        elif operation is REDUCE_GRAD:
            self._reductions.append((entry, start))

    def waited(self, entry: Entry) -> None:
        """Report that all inputs of the compute action ``entry`` are there."""
        for part in entry.parts or (entry,):
            gather = self._gathers.pop(part.index, None)
            if gather is not None:
                opened, start = gather
                tell_ran(opened.text, "gather", opened.operation.value, start, self._clock.mark())

    def end(self) -> None:
        """Report the end of the step and of its reductions."""
        for entry, start in self._reductions:
            tell_ran(entry.text, "reduce", entry.operation.value, start, self._clock.mark())
