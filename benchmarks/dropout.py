"""CPU time of dropout that draws by position, against torch's own, in one interleaved run.

    python benchmarks/dropout.py

Prints, for each shape of activations and for forward alone, nanoseconds an element (best of the
rounds) and the median ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from meshwright.randomness import DimPart, Draws, Dropout

ROUNDS = 15
SHAPES = [(8, 16, 16), (8, 128, 64), (64, 512), (8, 256, 1024)]


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    for shape in SHAPES:
        x, draws = torch.randn(shape), Draws(seed=0)
        half = x[..., : shape[-1] // 2].contiguous()
        calls = max(2**18 // x.numel(), 1)
        theirs = nn.Dropout(0.1)
        ours = Dropout(0.1, site="x", draws=draws)
        cut = Dropout(0.1, site="x", draws=draws, parts=[DimPart(dim=-1, index=0, parts=2)])
        arms = [(theirs, x), (ours, x), (cut, half)]
        times: list[list[float]] = [[], [], []]
        with draws.microbatch(0, range(shape[0])):
            for _ in range(ROUNDS):
                for found, (module, given) in zip(times, arms, strict=True):
                    spent = seconds(lambda m=module, g=given, n=calls: [m(g) for _ in range(n)])
                    found.append(spent / calls / given.numel() * 1e9)
        best = [min(found) for found in times]
        ratios = [
            statistics.median(a / b for a, b in zip(found, times[0], strict=True))
            for found in times[1:]
        ]
        print(
            f"{shape}: torch {best[0]:.1f} ns an element, ours {best[1]:.1f} (x {ratios[0]:.2f}), "
            f"half of the last dim {best[2]:.1f} (x {ratios[1]:.2f})"
        )


if __name__ == "__main__":
    main()
