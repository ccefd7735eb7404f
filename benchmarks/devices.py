"""Data-parallel training on one device against torch's own: what the strategies themselves cost.

    python benchmarks/devices.py                         # on a GPU: large and tiny
    python benchmarks/devices.py --json figures.json
    python benchmarks/devices.py --models miniature --rounds 1     # what runs on a CPU

The world has one rank, so that nothing is hidden behind communication. Arms take turns in short
rounds. Given are the medians of the rounds and their quartiles: the time of a step, until the
device has done it; the time of the host for each unit, until all of a step is launched; and, of one
step in a profiler's trace, launches and calls in which the host waits for the device. The peak of
the device's memory (on a CPU that of the process) is of processes of their own, one for each arm,
some of them side by side.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from _data_parallel_arms import WORKLOADS, Workload, make
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright import comm

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from gpu.traces import REGION, counted, spans_of

__all__ = ["main"]

ARMS = ("plain", "ddp", "replicate", "fsdp1 orig", "facade orig", "fsdp2", "fully_shard")
WARM = 3
SIDE_BY_SIDE = 4
"""Processes that measure peaks at once."""

Row = dict[str, Any]
"""What was measured of one arm."""


def enter() -> torch.device:
    """Join a world of one rank, on the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        comm.connect("cpu:gloo,cuda:nccl")
        return torch.device("cuda", 0)
    torch.set_num_threads(1)
    comm.connect("gloo")
    return torch.device("cpu")


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Arm:
    """A model under one strategy, with a batch that stays on the device."""

    def __init__(self, name: str, arm: str, model: nn.Module, batch: torch.Tensor) -> None:
        self.model = make(name, arm, model)
        self.batch = batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4)
        for _ in range(WARM):
            self.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.model(self.batch).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def spend(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and those of the host until it is launched."""
        device = self.batch.device
        finish(device)
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        launched = time.perf_counter()
        finish(device)
        return (time.perf_counter() - begun) / steps, (launched - begun) / steps

    def counts(self) -> Row:
        """Launches and host stops of one step."""
        activities = [ProfilerActivity.CPU]
        if self.batch.is_cuda:
            activities.append(ProfilerActivity.CUDA)
        finish(self.batch.device)
        with profile(activities=activities) as trace:
            with record_function(REGION):
                self.step()
            finish(self.batch.device)
        found = counted(spans_of(trace))
        return {"launches": found.launches, "host stops": len(found.stops)}


def parts_of(work: Workload, device: torch.device) -> tuple[nn.Module, torch.Tensor, int]:
    """The model and a batch on ``device``, and the number of units."""
    torch.manual_seed(0)
    model = work.build().to(device)
    units = sum(isinstance(part, work.layer) for part in model.modules()) + 1
    return model, work.batch().to(device), units


def measure_times(_: int, options: argparse.Namespace, name: str, results: dict[str, Row]) -> None:
    """One process with all arms of a model."""
    device = enter()
    work = WORKLOADS[name]
    model, batch, units = parts_of(work, device)
    arms = {arm: Arm(name, arm, model, batch) for arm in options.arms}
    spent: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        for arm in options.arms if number % 2 else options.arms[::-1]:
            spent[arm].append(arms[arm].spend(work.steps))
    for arm, rows in spent.items():
        steps, hosts = zip(*rows, strict=True)
        results[arm] = {
            "step ms": quartiles([seconds * 1e3 for seconds in steps]),
            "host us a unit": quartiles([seconds * 1e6 / units for seconds in hosts]),
            **arms[arm].counts(),
        }
        if "plain" in spent:
            pairs = zip(steps, spent["plain"], strict=True)
            results[arm] |= {"step / plain": quartiles([mine / one[0] for mine, one in pairs])}
    comm.disconnect()


def measure_peak(_: int, name: str, arm: str, peaks: dict[str, float]) -> None:
    """A process with one arm: the most memory that was in use."""
    device = enter()
    model, batch, _units = parts_of(WORKLOADS[name], device)
    built = Arm(name, arm, model, batch)
    del model
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    built.spend(2)
    if device.type == "cuda":
        bytes_ = torch.cuda.max_memory_allocated()
    else:
        bytes_ = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks[arm] = bytes_ / 2**20
    comm.disconnect()


def quartiles(values: Sequence[float]) -> list[float]:
    """The median between the quartiles; one value is all three."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4)


def table(name: str, title: str, rows: dict[str, Row]) -> str:
    """The rows of one model in Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"`{name}`, {title}:", "", f"| arm | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for arm, row in rows.items():
        cells = [shown(row[column]) for column in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: float | list[float]) -> str:
    """A number, or a median with its quartiles, in three digits."""
    if isinstance(value, list):
        low, middle, high = map(shown, value)
        return f"{middle} ({low}..{high})"
    return (
        str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1e3 else f"{value:.0f}"
    )


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["large", "tiny"] if on_gpu else ["miniature"]
    parser.add_argument("--models", nargs="+", default=models, choices=list(WORKLOADS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures to this file, too")
    options = parser.parse_args()
    title = f"torch {torch.__version__}, {torch.cuda.get_device_name(0) if on_gpu else 'CPU'}"
    figures: dict[str, dict[str, Row]] = {}
    with mp.Manager() as manager:
        for name in options.models:
            times, peaks = manager.dict(), manager.dict()
            mp.spawn(measure_times, (options, name, times))
            with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                each = [(name, arm, peaks) for arm in options.arms]
                list(pool.map(functools.partial(mp.spawn, measure_peak), each))
            figures[name] = {arm: {**times[arm], "peak MiB": peaks[arm]} for arm in options.arms}
            print(table(name, f"{title}, medians of {options.rounds} rounds", figures[name]) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps({"title": title, "models": figures}, indent=1))


if __name__ == "__main__":
    main()
