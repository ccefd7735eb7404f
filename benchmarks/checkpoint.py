"""CPU time of saving, loading and verifying checkpoints of many small tensors.

    python benchmarks/checkpoint.py

Prints, for each number of tensors, seconds of CPU time and microseconds a tensor. Exits with status
1 where a tensor among the most costs three times one among the fewest.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.checkpoint import load_into, load_tensors, save_tensors, verify

COUNTS = (1_000, 10_000, 100_000)
LIMIT = 3.0


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(folder: Path, count: int) -> dict[str, float]:
    """Seconds of each operation on ``count`` tensors."""
    tensors = {f"layers.{n}.weight": torch.full((2, 3), float(n)) for n in range(count)}
    saved: list[Path] = []
    found = {"save": seconds(lambda: saved.append(save_tensors(folder, tensors, {}, step=count)))}
    found["load"] = seconds(lambda: load_tensors(saved[0]))
    found["load_into"] = seconds(lambda: load_into(saved[0], tensors))
    found["verify"] = seconds(lambda: verify(saved[0]))
    return found


def main() -> int:
    """Measure and print; the exit status."""
    torch.set_num_threads(1)
    each: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), 100)  # what the first call loads is not counted
        for count in COUNTS:
            found = measure(Path(folder), count)
            each.append({name: spent / count * 1e6 for name, spent in found.items()})
            row = (
                f"{name} {spent:.2f} s ({spent / count * 1e6:.0f} us)"
                for name, spent in found.items()
            )
            print(f"{count:>7,} tensors: {', '.join(row)}", flush=True)
    worst = max(each[-1][name] / each[0][name] for name in each[0])
    print(f"a tensor among {COUNTS[-1]:,} costs at most {worst:.2f} times one among {COUNTS[0]:,}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
