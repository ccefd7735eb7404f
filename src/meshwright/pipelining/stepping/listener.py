"""Tells whoever listens of each action of a step: observers of `comm`, and torch's profiler.

Compute is told from when all that it reads is there, so that waiting is not counted as work. A
gather is under way from its UNSHARD until the first compute that waited for it, a reduction until
the end of the step. Transfers are told by the communicator, under the texts of their actions.
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
    """Tells of the actions of one step on one rank."""

    def __init__(self, clock: Clock, *, is_profiled: bool) -> None:
        self._clock = clock
        self._is_profiled = is_profiled
        self._gathers: dict[int, tuple[Entry, Mark]] = {}
        self._reductions: list[tuple[Entry, Mark]] = []

    @classmethod
    def attached(cls, clock: Clock) -> Listener | None:
        """Make a listener when somebody listens; None, in general."""
        has_profiler = is_profiled()
        if has_profiler or hears_actions():
            return cls(clock, is_profiled=has_profiler)
        return None

    @contextlib.contextmanager
    def action(self, entry: Entry) -> Iterator[None]:
        """Tell of the block as the action of ``entry``."""
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
        """Tell that all is there that the compute action ``entry`` needs."""
        for part in entry.parts or (entry,):
            gather = self._gathers.pop(part.index, None)
            if gather is not None:
                opened, start = gather
                tell_ran(opened.text, "gather", opened.operation.value, start, self._clock.mark())

    def end(self) -> None:
        """Tell that the step has ended, its reductions too."""
        for entry, start in self._reductions:
            tell_ran(entry.text, "reduce", entry.operation.value, start, self._clock.mark())
