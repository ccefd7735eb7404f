"""Measures what the planner's hardware file says of this machine, between ranks started for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm import Communicator
from meshwright.doctor.collectives import answer_of
from meshwright.doctor.survey import usable_cores
from meshwright.environment import memory_limit
from meshwright.errors import LaunchError
from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware, this_machine

_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DTYPES = ("bfloat16", "float32")
_LAUNCHES = 100
_MOST = 1000
"""Repetitions of one measurement."""


def calibrate(seconds: float) -> Hardware:
    """Measure for about ``seconds``, on a rank for each GPU, else for each of up to 8 cores.

    All ranks compute at the same time, as in a run. Raises ``LaunchError`` if they fail.
    """
    gpus = torch.cuda.device_count()
    ranks = gpus or max(2, min(8, int(usable_cores())))
    found = answer_of(ranks, "cuda" if gpus else "cpu", str(seconds))
    if isinstance(found, str):
        raise LaunchError(f"this machine cannot be measured: {found}")
    name, memory, processors, major = "cpu", memory_limit()[0] / ranks, 1, 8
    if gpus:
        about = torch.cuda.get_device_properties(0)
        name, memory, processors = about.name, about.total_memory, about.multi_processor_count
        major = about.major
    shipped = this_machine(name, calibrated=False)
    rate, links = found["bfloat16"] / 1e12, found["links"] / 1e9
    measured = {each: found[each] for each in ("half_size", "launch", "latency")}
    generation: Any = "ampere" if major < 9 else "hopper" if major == 9 else "blackwell"
    return Hardware(
        name=name,
        generation=generation,
        memory_gib=memory / 2**30,
        peak_tflops=max(shipped.peak_tflops, rate) if shipped else rate,
        matmul_tflops=rate,
        matmul_fp32_tflops=found["float32"] / 1e12,
        memory_gbps=found["memory"] / 1e9,
        processors=processors,
        node=ranks,
        intra_gbps=links,
        inter_gbps=shipped.inter_gbps if shipped else links,
        # Shares of a GPU's rate and of data sheets' links do not hold for what was measured here.
        constants=Constants(links=1.0, **measured, **({} if gpus else {"product_ampere": 1.0})),
    )


def rates(communicator: Communicator, seconds: float) -> dict[str, Any]:
    """Measure rates in operations and bytes a second, and times; all ranks call it together."""
    device, ranks = communicator.device, communicator.size
    is_gpu, began = device.type == "cuda", time.perf_counter()

    def timed(share: float, run: Callable[[], object]) -> float:
        """Median seconds of ``run`` on the slowest rank, repeated for ``share`` of the time."""

        def once() -> float:
            start = time.perf_counter()
            run()
            if is_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        def slowest(took: float) -> float:
            return max(communicator.gather_numbers([took], label="calibrate"))[0]

        once()
        times, start, is_over = [once()], time.perf_counter(), False
        while not is_over and len(times) < _MOST:
            now = time.perf_counter()
            # The ranks agree on it, after fewer and fewer questions.
            is_over = slowest(max((now - start) / share, now - began)) > seconds
            times += [once() for _ in range(0 if is_over else len(times))]
        return slowest(statistics.median(times))

    def tensor(*shape: int, dtype: str = "float32", value: float = 0.5) -> torch.Tensor:
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=device)

    small, added = tensor(1), tensor(1).requires_grad_()

    def launches() -> None:
        value = small
        for _ in range(_LAUNCHES):
            value = value + added

    found = {"launch": timed(0.03, launches) / _LAUNCHES}
    usual = _DTYPES[0] if is_gpu else _DTYPES[1]
    for dtype in _DTYPES:
        by_size: dict[int, float] = {}
        for size in _SIZES:
            a, b = tensor(size, size, dtype=dtype), tensor(size, size, dtype=dtype)
            took = timed(0.02, lambda a=a, b=b: torch.mm(a, a, out=b))
            by_size[size] = 2.0 * size**3 / max(took - found["launch"], took / 2)
            if 8 * took > seconds / 20:  # of the next size
                break
        found[dtype] = max(by_size.values())
        if dtype == usual:
            # A product of smallest dim s has s / (s + half) of the largest rate.
            halves = [size * (found[dtype] / rate - 1) for size, rate in by_size.items()]
            found["half_size"] = max(1.0, statistics.median(halves))
    source = tensor(2 ** (28 if is_gpu else 24))
    target = torch.empty_like(source)
    found["memory"] = 2.0 * source.nbytes / timed(0.1, lambda: target.copy_(source))
    most = source.numel() // 4
    few, many = tensor(256), tensor(most)
    of_few, of_many = tensor(256 * ranks), tensor(most * ranks)
    found["latency"] = timed(0.1, lambda: communicator.all_gather(of_few, few).wait())
    took = timed(0.2, lambda: communicator.all_gather(of_many, many).wait())
    received = (ranks - 1) * many.nbytes or source.nbytes  # of a single rank: a copy
    found["links"] = received / max(took - found["latency"], took / 2)
    return found
