"""Where a check runs: on a GPU, on a simulated device, or on the host; one body for all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.traces import REGION, counted, spans_of
from meshwright import comm
from meshwright.comm import Communicator
from meshwright.testing.simulated import DEVICE, simulated
from support.internals.comm import Launched
from support.internals.testing import BACKEND, register

SLEEP_CYCLES = 20_000_000
"""Some ten milliseconds of a GPU's clock."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device of the tensors, a way to connect, and a way to see where the host stops."""

    device: torch.device
    connect: Callable[..., Communicator]
    stops: Callable[[], AbstractContextManager[list[str]]]
    """Lists, at its end, the calls of the block in which the host has waited for the device."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def to(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in tensors]


@contextmanager
def place_of(kind: str) -> Iterator[Place]:
    """``nccl``, ``gloo`` (ranks that may share a GPU), ``simulated`` or ``host``."""
    if kind == "simulated":
        with simulated() as device:
            register(device)

            @contextmanager
            def stops() -> Iterator[list[str]]:
                first, found = len(device.stops), list[str]()
                yield found
                found += map(str, device.stops[first:])

            connect = functools.partial(comm.connect, BACKEND)
            yield Place(device=DEVICE, connect=connect, stops=stops)
        return
    if kind == "host":
        yield Place(device=torch.device("cpu"), connect=comm.connect, stops=_nothing_to_wait_for)
        return
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if kind == "nccl" and int(os.environ["WORLD_SIZE"]) > count:
        # NCCL refuses two ranks of one host on one GPU; between hosts it sends over sockets.
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    index = rank % count
    torch.cuda.set_device(index)
    backend = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}[kind]
    connect = functools.partial(comm.connect, backend)
    yield Place(device=torch.device("cuda", index), connect=connect, stops=_stops_of_cuda)
    torch.cuda.synchronize()  # what has gone wrong late is told here


@contextmanager
def _nothing_to_wait_for() -> Iterator[list[str]]:
    yield []


@contextmanager
def _stops_of_cuda() -> Iterator[list[str]]:
    """Raises at the first that torch knows of; those of c10d and of events are in the trace."""
    found: list[str] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with record_function(REGION):
                yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = counted(spans_of(trace))
    assert counts.launches, "the profiler saw no launch: are its counters (CUPTI) allowed here?"
    found += counts.stops


@contextmanager
def slow_collectives(place: Place) -> Iterator[None]:
    """Let each collective begin late on a GPU, so that whoever does not wait for it reads too soon.

    It is launched from a stream that sleeps, which the compute stream does not wait for. On a
    simulated device they end late and in any order by themselves.
    """
    if not place.is_gpu:
        yield
        return
    issue, side = Communicator._issue, torch.cuda.Stream(place.device)

    def late(launch: Callable[..., Launched], group: object) -> Launched:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            works, finish = launch(group)
        if not works:  # it is over for whoever comes later on this stream
            current.wait_stream(side)
        return works, finish

    def issued(self: Communicator, kind: str, tensor: torch.Tensor, label: str, launch, **more):  # noqa: ANN001, ANN003, ANN202
        if tensor.is_cuda:
            launch = functools.partial(late, launch)
        return issue(self, kind, tensor, label, launch, **more)

    Communicator._issue = issued  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator._issue = issue  # type: ignore[method-assign]
