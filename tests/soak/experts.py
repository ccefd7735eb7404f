"""The example of experts on 4 ranks trains as one process: 300 steps of losses and imbalances.

Run it as ``python tests/soak/experts.py [--steps 300] [--dtype float64] [--axes expert=4]``.
In float32 rounding grows until a token goes to another expert; from before step 50 on, losses then
differ by 1e-2. Exits with status 1 when losses differ by more than 1e-6 relative, when they do not
fall, or when the report shows no imbalance.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.internals.recipes import read_config
from support.recipes.experts import apart, curve_of_metrics, curve_of_one_process

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "experts.toml"
LIMIT = 1e-6


def main() -> int:
    """Train both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--axes", nargs="+", default=[], help="sizes other than the example's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        given = [
            f"run.folder={folder}",
            f"run.steps={options.steps}",
            "run.check_parity=false",
            f"precision.parameters={options.dtype}",
            *(f"axes.{size}" for size in options.axes),
        ]
        words = [f"--{each}" for each in given]
        begun = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "meshwright", "train", str(EXAMPLE), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            check=True,
        )
        print(f"4 ranks: {time.monotonic() - begun:.0f} s")
        ours = curve_of_metrics(folder)
        is_shown = "Tokens of the busiest expert" in (folder / "report.html").read_text("utf-8")
        theirs = curve_of_one_process(read_config(EXAMPLE, given))
    losses, imbalances = (apart(*each) for each in zip(ours, theirs, strict=True))
    for step in sorted({1, 10, 20, 50, 100, 200, options.steps}):
        if step <= options.steps:
            print(
                f"step {step}: loss {ours.losses[step - 1]:.6f}, of one process "
                f"{theirs.losses[step - 1]:.6f}, apart at most {losses[step - 1]:.1e} so far; "
                f"imbalance {ours.imbalances[step - 1]:.3f}, of one process "
                f"{theirs.imbalances[step - 1]:.3f}, at most {imbalances[step - 1]:.1e} so far"
            )
    does_fall = ours.losses[-1] < ours.losses[0] - 1.0
    is_held = losses[-1] <= LIMIT and does_fall and is_shown
    print(
        f"{'held' if is_held else 'missed'}: losses of {options.steps} steps in {options.dtype} "
        f"differ from one process by {losses[-1]:.1e} relative, at most {LIMIT:.0e}; imbalance "
        f"is {'' if is_shown else 'not '}in the report"
    )
    return 0 if is_held else 1


if __name__ == "__main__":
    raise SystemExit(main())
