"""A device as far as NCCL's failures go: the host never waits for an operation, nor raises for it.

An operation ends when every rank of its group has issued it, else never: a peer that ends or stops
leaves it standing, as one of NCCL's. Tensors are torch's meta tensors, so there are no numbers.
Each group has a watchdog with c10d's limit, which ends the process as c10d's does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import types
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.torch_internals.distributed import Work
from support.internals.comm import CpuTransport, GroupOptions, PythonGroup
from support.internals.torch_internals import living_groups

DEVICE = torch.device("meta")
NAME = "late"

calls: list[str] = []
"""What was asked of the backends by our monitor: begin and end of a group of calls, aborts."""


class Job:
    def __init__(self, name: str) -> None:
        self.name, self.begun, self.done = name, time.monotonic(), threading.Event()


class Stream:
    """Jobs that whatever is queued next waits for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.is_capturing = False

    def synchronize(self) -> None:
        """Hold the host, in C, until the device has done all."""
        for job in list(self.jobs):
            job.done.wait()
        self.jobs.clear()


class Mark:
    """An event of the device; questions are counted, and those that break a capture off."""

    queries = 0
    queries_in_a_capture = 0

    def record(self, stream: Stream) -> None:
        assert not stream.is_capturing, "an event was recorded into a graph"
        self._jobs = list(stream.jobs)

    def query(self) -> bool:
        Mark.queries += 1
        Mark.queries_in_a_capture += STREAM.is_capturing
        return all(job.done.is_set() for job in self._jobs)


STREAM = Stream()


@contextlib.contextmanager
def _using(stream: Stream) -> Iterator[None]:
    yield


class LateWork(Work):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        STREAM.jobs.append(self._job)
        return True

    def is_completed(self) -> bool:
        return self._job.done.is_set()


class _Transport(CpuTransport):
    supports_coalescing = True

    def __init__(self, group: LateGroup) -> None:
        super().__init__(NAME, group.set_timeout)
        self._group = group
        self.options = types.SimpleNamespace(_timeout=group.limit)

    @property
    def __class__(self) -> type:
        return _Transport

    def _group_start(self) -> None:
        calls.append("start")

    def _group_end(self) -> None:
        calls.append("end")

    def abort(self) -> None:
        calls.append("abort")
        self._group.abort_jobs()


class LateGroup(PythonGroup):
    """The operations of one group, which a thread works off in their order."""

    ignores_aborts = False
    """True where an abort ends nothing."""
    creates_lazily = False
    """True where the first operation holds the host until all ranks have come to it."""

    def __init__(self, options: GroupOptions, _: object = None) -> None:
        super().__init__(options, NAME)
        store = dist.PrefixStore("late", options.store)
        rank, size = options.group_rank, options.group_size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(hours=1))
        self.limit = options.timeout
        self._is_aborted = self._is_created = False
        self._open: list[Job] = []
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for target in (self._work_off, self._watch):
            threading.Thread(target=target, name=f"late {self._name}", daemon=True).start()

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit = timeout

    def label_next(self, label: str) -> None:
        pass  # it shows none

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: object = None) -> LateWork:
        if self._is_aborted:
            raise dist.DistBackendError("the communicator was aborted")
        job = Job("all_reduce")
        self._open.append(job)
        self._queue.put(job)
        if LateGroup.creates_lazily and not self._is_created:
            job.done.wait()
            if self._is_aborted:
                raise dist.DistBackendError("the communicator was aborted")
        self._is_created = True
        return LateWork(job)

    def abort_jobs(self) -> None:
        self._is_aborted = True
        if not LateGroup.ignores_aborts:
            for job in list(self._open):
                job.done.set()

    def _work_off(self) -> None:
        while True:
            job = self._queue.get()
            try:
                self._gloo.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()
            except RuntimeError:  # a peer has gone: a kernel goes on waiting for it
                return
            job.done.set()
            self._open.remove(job)

    def _watch(self) -> None:
        while True:
            time.sleep(0.05)
            for job in list(self._open):
                if time.monotonic() - job.begun > self.limit.total_seconds():
                    print(f"c10d's watchdog: {job.name} has timed out", flush=True)
                    os.kill(os.getpid(), signal.SIGABRT)

    @property
    def _device_types(self) -> Sequence[torch.device]:
        return (DEVICE,) if self in living_groups() else ()

    def _get_backend(self, device: torch.device) -> _Transport:
        return _Transport(self)

    def shutdown(self) -> None:
        """Leave the group."""


def install() -> None:
    """Make device and backend known to torch, in this process."""
    module = types.SimpleNamespace(
        Event=Mark,
        current_stream=lambda device=None: STREAM,
        is_current_stream_capturing=lambda: STREAM.is_capturing,
        stream=_using,
    )
    setattr(torch, DEVICE.type, module)  # torch.get_device_module looks there
    dist.Backend.register_backend(NAME, LateGroup, extended_api=True, devices=[DEVICE.type])


def tensor() -> torch.Tensor:
    return torch.empty(1, device=DEVICE)
