"""Measures collectives between ranks started for this: on CPUs, and with one rank per GPU."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import Communicator
from meshwright.comm.groups.launch import launch
from meshwright.doctor.machine import Finding
from meshwright.errors import MeshwrightError

MEASURED_RANKS = 2
_ROUNDS = 50
# Above these medians, something is wrong with the loopback device or the cores, not with the code.
_SLOW_SECONDS = {"all_reduce 4 KB": 0.02, "all_reduce 1 MB": 0.2, "barrier": 0.02}
_LARGE = 2**24
"""Elements of float32 that the GPUs reduce: 64 MiB."""


def measure() -> Iterator[Finding]:
    """Start two CPU ranks and report the median time of small collectives between them."""
    answer = answer_of(MEASURED_RANKS, "cpu")
    if isinstance(answer, str):
        yield _failed("collectives", MEASURED_RANKS, answer, "GLOO_SOCKET_IFNAME=lo")
        return
    for name, seconds in answer["medians"].items():
        bound = _SLOW_SECONDS[name]
        is_slow = seconds > bound
        yield Finding(
            name=name,
            value=f"{seconds * 1e6:,.0f} us (median, {MEASURED_RANKS} ranks, {answer['backend']})",
            problem=f"expected less than {bound * 1e6:,.0f} us" if is_slow else "",
            remedy="stop other work on these cores and measure again" if is_slow else "",
        )


def measure_gpus(ranks: int) -> Iterator[Finding]:
    """Start a rank for each GPU, reduce 64 MiB, and measure the memory of their communicator."""
    answer = answer_of(ranks, "cuda")
    if isinstance(answer, str):
        yield _failed("all_reduce on GPUs", ranks, answer, "NCCL_DEBUG=INFO to see more")
        return
    yield from findings_of_gpus(ranks, answer)


def findings_of_gpus(ranks: int, answer: dict[str, Any]) -> Iterator[Finding]:
    """Report the result of the ranks of `measure_gpus`."""
    seconds = answer["medians"]["all_reduce 64 MiB"]
    # Each rank sends and receives 2 (n - 1) / n of the bytes, whatever the algorithm.
    rate = 4 * _LARGE * 2 * (ranks - 1) / ranks / seconds / 1e9
    yield Finding(
        name="all_reduce 64 MiB",
        value=f"{seconds * 1e6:,.0f} us (median, {ranks} GPUs, {answer['backend']})"
        + (f", {rate:.1f} GB/s a GPU" if ranks > 1 else ""),
    )
    yield Finding(
        name="communicators",
        value=f"1 of {ranks} ranks takes {answer['bytes'] / 2**20:.0f} MiB of each GPU; "
        "a run has one for each axis, and pipelines have more between neighbors",
    )


def _failed(name: str, ranks: int, error: str, variable: str) -> Finding:
    return Finding(
        name=name,
        value="failed",
        problem=f"expected {ranks} ranks to reduce a tensor, found: {error}",
        remedy=f"fix the cause it names; if it names none, set {variable}",
        is_broken=True,
    )


def answer_of(ranks: int, where: str, *more: str) -> dict[str, Any] | str:
    """Return what rank 0 of ``ranks`` measured, or the error of their run.

    ``more``: seconds, to measure what `calibration` does.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-doctor-") as folder:
        target = Path(folder, "medians.json")
        command = [sys.executable, "-m", "meshwright.doctor", str(target), where, *more]
        try:
            launch(command, ranks)
            found: dict[str, Any] = json.loads(target.read_text())
        except (MeshwrightError, OSError, ValueError) as error:
            return " ".join(str(error).split())
        return found


def medians_on_host(communicator: Communicator) -> dict[str, Any]:
    """Measure small collectives of CPU ranks."""
    small, large = torch.zeros(1024, device="cpu"), torch.zeros(2**18, device="cpu")
    return {
        "medians": {
            "all_reduce 4 KB": _median(lambda: communicator.all_reduce(small).wait()),
            "all_reduce 1 MB": _median(lambda: communicator.all_reduce(large).wait()),
            "barrier": _median(lambda: communicator.barrier().wait()),
        }
    }


def medians_on_device(
    communicator: Communicator, free: Callable[[], int], finish: Callable[[], None]
) -> dict[str, Any]:
    """Measure an all-reduce on a device; ``free`` returns the free bytes of its memory.

    ``finish`` makes the host wait for the device.
    """
    large = torch.zeros(_LARGE, device=communicator.device)
    finish()
    before = free()

    def reduce() -> None:
        communicator.all_reduce(large).wait()
        finish()

    reduce()
    taken = before - free()
    return {"medians": {"all_reduce 64 MiB": _median(reduce)}, "bytes": taken}


def _median(run: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
