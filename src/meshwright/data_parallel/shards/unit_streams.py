"""The streams of a device on which the units of one root are gathered and reduced.

::

    compute   unit 1 ─────────┐unit 2 ─────────┐unit 3             waits for what it is to read
    gathers   gather of 2     │gather of 3     │gather of 4        wait for the unit whose memory
              (beside unit 1) └> gives back 1  └> gives back 2     they take, by events
    sums      gradients of 5    gradients of 4                     means are made here, too
    further   second sum of 6   second sum of 5                    of hybrid sharding

Memory is given back to the stream that it came from, once that stream waits for all who use it.
The host may be steps ahead: what bounds the memory of whole units is the order of the device.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from meshwright.comm.streams import Event, SideStream, captures, current_stream, record
from meshwright.data_parallel.shards.buffer import FlatBuffer
from meshwright.data_parallel.shards.parameter_group import ParameterGroup


class UnitStreams:
    """The streams beside the computation, and the order between them and it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gathers = SideStream(device)
        self.sums = SideStream(device)
        self.further = SideStream(device)
        """For sums over ``replicate`` that follow those over ``shard``."""
        self._all = self.gathers, self.sums, self.further
        self._computation = [current_stream(device)]
        """The stream that the last pass began on, in a list: `_leave` must not hold this object."""
        end = weakref.finalize(self, _leave, device, self._computation, self._all, os.getpid())
        end.atexit = False  # pyrefly: ignore[missing-attribute]
        self._left: deque[tuple[Event, Sequence[ParameterGroup], list[FlatBuffer]]] = deque()
        """Units to free once these events have passed, with the buffers whose memory that is: a
        group may have been given another buffer since."""
        self._is_running = False
        """True where shards are as they were when `begin` was called."""

    def begin(self) -> None:
        """Begin a pass: gathers wait for the writes to the shards so far, and for no later ones."""
        self._give_back(0)
        self.gathers.follow()
        self._computation[0] = current_stream(self._device)
        self._is_running = True

    def end(self) -> None:
        """End the passes whose gathers read the same shards; all memory is given back."""
        self._give_back(0)
        self._is_running = False

    @contextmanager
    def gathering(self, groups: Sequence[ParameterGroup], *, is_late: bool) -> Iterator[None]:
        """Gather ``groups`` in the block, in the memory of units that were freed before.

        One that ``is_late`` overlaps the computation of the unit before, which keeps its memory.
        """
        if not self._is_running:
            self.gathers.follow()
        for left in [left for left in self._left if left[1] is groups]:
            self._left.remove(left)
            self.gathers.wait_for(left[0])
        self._give_back(1 if is_late else 0)
        with self.gathers.used():
            yield

    def leave(self, groups: Sequence[ParameterGroup]) -> None:
        """Free the full parameters of ``groups`` behind the work enqueued by now."""
        self._left.append((record(self._device), groups, [group.buffer for group in groups]))
        if not self._is_running:
            self._give_back(0)

    def stop(self) -> None:
        """Make all streams wait for each other: what comes next may use any memory."""
        _join(self._all)
        self.end()

    def deliver(self, *, to_host: bool) -> None:
        """Make the computation wait for all sums; the host too, where means lie there."""
        for stream in (self.sums, self.further):
            event = stream.mark()
            event.wait()
            if to_host:
                event.synchronize()

    def _give_back(self, keeps: int) -> None:
        while len(self._left) > keeps:
            event, _, buffers = self._left.popleft()
            self.gathers.wait_for(event)
            for buffer in buffers:
                buffer.release()


def _join(streams: Sequence[SideStream]) -> None:
    """Make ``streams`` and the current one wait for each other."""
    for stream in streams:
        stream.mark().wait()
    for stream in streams:
        stream.follow()


def _leave(
    device: torch.device, computations: Sequence[object], streams: Sequence[SideStream], pid: int
) -> None:
    """Finalizer: joins the ``streams`` of a root that dies within a pass, before its memory goes.

    Nothing in a process that was forked since, which must not ask the device.
    """
    (computation,) = computations
    if pid == os.getpid() and not captures(device, computation):
        with torch.get_device_module(device).stream(computation):
            _join(streams)
