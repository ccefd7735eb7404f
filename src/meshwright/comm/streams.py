"""A common interface to devices, streams and clocks for CPU and CUDA.

On a CPU a mark is a number. On CUDA it is an event of the current stream, read on the device's own
clock.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in time on a device, taken without a host sync."""

    def seconds(self) -> float:
        """Return seconds of `time.monotonic`. On CUDA it waits until the device has passed it."""


def is_host(device: torch.device) -> bool:
    """Check whether ``device`` is the host, which reads its own tensors without waiting.

    A CPU device with an index is not the host: `meshwright.testing` simulates devices this way.
    """
    return device.type == "cpu" and device.index is None


class DeviceEvent(Protocol):
    """A point in a device's stream that the host and other streams can query and wait for."""

    def query(self) -> bool:
        """Check, without waiting, whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def wait(self) -> None:
        """Have the current stream wait for it."""


def record(device: torch.device) -> DeviceEvent:
    """Mark the work that this thread has queued on the current stream of ``device`` so far."""
    event = torch.get_device_module(device).Event()
    event.record(current_stream(device))
    return event


class SideStream:
    """A stream of a device in addition to the current ones of its threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def used(self) -> AbstractContextManager[object]:
        """Make it the current stream of this thread within the block."""
        return self._module.stream(self._stream)

    def mark(self) -> DeviceEvent:
        """Record an event after all work queued on this stream so far."""
        with self.used():
            return record(self._device)

    def wait_for(self, event: DeviceEvent) -> None:
        """Run later work on it only after the device has passed ``event``."""
        with self.used():
            event.wait()

    def follow(self) -> None:
        """Run later work on it only after all work queued on the current stream so far."""
        self.wait_for(record(self._device))


def current_stream(device: torch.device) -> object:
    """Return the stream of ``device`` that this thread queues work on."""
    return torch.get_device_module(device).current_stream(device)


def is_capturing(device: torch.device) -> bool:
    """Check whether this thread's work on ``device`` is being captured in a graph, not run."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def captures(device: torch.device, stream: object) -> bool:
    """Check from any thread whether ``stream``, or torch's default capture stream, captures now."""
    module: Any = torch.get_device_module(device)
    usual = getattr(getattr(module, "graph", None), "default_capture_stream", None)
    for each in (stream, usual):
        if each is not None:
            with module.stream(each):
                if is_capturing(device):
                    return True
    return False


def moved(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a few ``numbers`` to ``device``, if they are on the host, without a sync."""
    if is_host(device) or not is_host(numbers.device):
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


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

    Clocks of all processes of one machine are comparable; a CUDA device's clock is aligned with the
    host's when this clock is made.
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
