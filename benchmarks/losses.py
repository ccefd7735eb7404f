"""CPU time and peak memory of cross entropy in chunks, against all logits at once.

    python benchmarks/losses.py
    python benchmarks/losses.py --works small --rounds 15

A step is forward and backward from hidden states and the weight of a head to their gradients, of
32,768 classes in float32 on one core. ``plain`` is ``functional.cross_entropy(hidden @ weight.T)``;
``chunks`` is `meshwright.losses.linear_cross_entropy`. Sums and gradients are compared first. Then
the arms take turns in short rounds, so that a busy machine slows both alike; a ratio is taken
within a round. Peak memory is what a process of its own has at most beyond what it began with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _figures import note, quartiles
from torch.nn import functional

from meshwright.losses import linear_cross_entropy

__all__ = ["main"]

CLASSES = 32_768


@dataclass(frozen=True)
class Workload:
    """Rows of hidden states, their width, and the rows of a chunk."""

    rows: int
    width: int
    chunk: int = 1024


WORKS = {"small": Workload(1024, 64, 256), "wide": Workload(2048, 256), "long": Workload(8192, 128)}


def drawn(work: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and labels."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(work.rows, work.width, generator=draw, requires_grad=True)
    weight = torch.randn(CLASSES, work.width, generator=draw).div_(work.width**0.5)
    labels = torch.randint(CLASSES, (work.rows,), generator=draw)
    return hidden, weight.requires_grad_(), labels


def plain(
    work: Workload, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


def chunks(
    work: Workload, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, labels, chunk=work.chunk)[0]


Arm = Callable[[Workload, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ARMS: dict[str, Arm] = {"plain": plain, "chunks": chunks}


def step(work: Workload, arm: str, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Forward and backward; the sum and the gradients."""
    hidden, weight, labels = given
    total = ARMS[arm](work, hidden, weight, labels) / work.rows
    return [total.detach(), *torch.autograd.grad(total, (hidden, weight))]


def peak(work: Workload, arm: str) -> float:
    """MiB that a step needs beyond what it is given. Runs in a process of its own."""
    torch.set_num_threads(1)
    given = drawn(work)
    step(Workload(8, work.width, 8), arm, drawn(Workload(8, work.width)))
    before = most_resident()
    step(work, arm, given)
    return most_resident() - before


def most_resident() -> float:
    """MiB of the most memory of this process; ``ru_maxrss`` begins with that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024  # pyrefly: ignore


def seconds(work: Workload, arm: str, given: tuple[torch.Tensor, ...]) -> float:
    """CPU time of one step."""
    begin = time.process_time()
    step(work, arm, given)
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.works:
        work = WORKS[name]
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            most = {arm: pool.apply(peak, (work, arm)) for arm in ARMS}
        given = drawn(work)
        for mine, one in zip(step(work, "chunks", given), step(work, "plain", given), strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-3, atol=1e-6)
        spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(options.rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                spent[arm].append(seconds(work, arm, given))
        ratios = [a / b for a, b in zip(spent["chunks"], spent["plain"], strict=True)]
        low, middle, high = quartiles(ratios)
        note(f"loss in chunks, {name}: ours over all logits, CPU", ratios)
        note(
            f"loss in chunks, {name}: peak memory over all logits", [most["chunks"] / most["plain"]]
        )
        print(
            f"{name}: {work.rows:,} rows of {work.width}, chunks of {work.chunk:,}: "
            f"CPU {statistics.median(spent['chunks']):.2f} s over "
            f"{statistics.median(spent['plain']):.2f}, {middle:.2f} ({low:.2f}..{high:.2f}); "
            f"peak {most['chunks']:,.0f} MiB over {most['plain']:,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
