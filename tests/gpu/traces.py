"""What a trace of torch's profiler says of one region: launches, and waits of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

REGION = "meshwright: counted"
"""The range around what is counted; a profiler waits for the device itself when it ends."""

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
_GRAPHS = ("cudaGraphLaunch",)
_STOPS = frozenset(
    {
        *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaFree", "cuMemFree_v2"),
    }
)


class Span(NamedTuple):
    """An event of the host, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Counts:
    """What happened in a region."""

    launches: int
    stops: list[str]


def counted(spans: Iterable[Span]) -> Counts:
    """Count inside of the ranges named `REGION`. Raises ValueError where there is none."""
    listed = list(spans)
    regions = [span for span in listed if span.name == REGION]
    if not regions:
        raise ValueError(f"expected a range {REGION!r} in the trace, found none")
    inside = [
        span.name
        for span in listed
        if any(region.start <= span.start and span.end <= region.end for region in regions)
    ]
    return Counts(
        launches=sum(name.startswith((*_LAUNCHES, *_GRAPHS)) for name in inside),
        stops=[name for name in inside if name in _STOPS],
    )


def spans_of(trace: Any) -> list[Span]:
    """The events of a profiler that has ended."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end) for event in trace.events()
    ]
