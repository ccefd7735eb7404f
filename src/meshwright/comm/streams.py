"""One vocabulary of streams, events and clocks for CPU and CUDA.

On a CPU a stream is the calling thread: waiting is a no-op and a mark is a number. On CUDA the same
calls order work between streams and read the device's own clock.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in time on a device, taken without stopping it."""

    def seconds(self) -> float:
        """Return seconds of `time.monotonic`. On CUDA it waits until the device has passed it."""


class Stream(Protocol):
    """A queue of device work. CPU work runs at once, so its stream orders nothing."""

    def use(self) -> contextlib.AbstractContextManager[object]:
        """Work issued inside runs on this stream."""

    def wait_for(self, other: Stream) -> None:
        """Later work of this stream starts after the work that ``other`` has queued by now."""


class _HostStream:
    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def wait_for(self, other: Stream) -> None:
        pass


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def use(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def wait_for(self, other: Stream) -> None:
        if isinstance(other, _CudaStream):
            self.stream.wait_stream(other.stream)


def current_stream(device: torch.device) -> Stream:
    """Find the stream on which the caller's work for ``device`` runs."""
    if device.type == "cuda":
        return _CudaStream(torch.cuda.current_stream(device))
    return _HostStream()


def new_stream(device: torch.device, *, high_priority: bool = False) -> Stream:
    """Make a stream of its own for ``device``; on a CPU, the calling thread."""
    if device.type == "cuda":
        return _CudaStream(torch.cuda.Stream(device, priority=-1 if high_priority else 0))
    return _HostStream()


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Tell whether the host can read ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until all queued work of ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _HostMark:
    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class _CudaMark:
    def __init__(self, origin: torch.cuda.Event, event: torch.cuda.Event, start: float) -> None:
        self._origin, self._event, self._start = origin, event, start

    def seconds(self) -> float:
        self._event.synchronize()
        return self._start + self._origin.elapsed_time(self._event) / 1e3


class Clock:
    """Seconds of `time.monotonic` for the host and one device.

    Clocks of all processes of one machine can be laid side by side; a CUDA device's marks are
    brought onto the host's time when the clock is made.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._origin: torch.cuda.Event | None = None
        self._start = 0.0
        if self.device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(self.device)
            self._origin.record(torch.cuda.current_stream(self.device))
            self._start = time.monotonic()

    def mark(self) -> Mark:
        """Mark this point of the current stream of the clock's device."""
        if self._origin is None:
            return _HostMark(time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return _CudaMark(self._origin, event, self._start)
