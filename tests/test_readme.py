"""The example of the README is the file in examples/, and it trains."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.testing import Ranks

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "replicate.py"


def test_the_readme_shows_the_file() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    code = EXAMPLE.read_text().partition("from __future__ import annotations\n\n")[2]
    assert shown.group(1) == code


def test_the_example_trains_the_same_model_on_two_ranks(ranks: Ranks) -> None:
    def body() -> tuple[float, list[float]]:
        found = runpy.run_path(str(EXAMPLE))
        return found["loss"].item(), found["model"].weight.flatten().tolist()

    first, second = ranks(2, body, connected=False)
    assert max(first[0], second[0]) < 0.01
    assert first[1] == second[1]


@pytest.mark.slow
def test_torchrun_starts_the_example() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    # The ranks share one pipe and write the end of a line by itself: lines may run together.
    number = r"(-?\d+\.\d{6})"
    lines = re.findall(rf"rank (\d) of 2: loss {number}, weights {number}", done.stdout)
    assert {rank for rank, *_ in lines} == {"0", "1"}
    assert all(float(loss) < 0.01 for _, loss, _ in lines)
    assert len({weights for *_, weights in lines}) == 1
