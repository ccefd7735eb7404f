"""The benchmark of devices, on a CPU, for one round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_miniature_runs_and_says_all_of_each_arm(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    arms = ["plain", "fsdp2", "fully_shard"]
    program = [sys.executable, str(ROOT / "benchmarks/devices.py"), "--models", "miniature"]
    done = subprocess.run(
        [*program, "--rounds", "1", "--json", str(target), "--arms", *arms],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(target.read_text())["models"]["miniature"]
    assert list(rows) == arms
    for arm, row in rows.items():
        assert f"| {arm} |" in done.stdout
        low, middle, high = row["step ms"]
        assert 0 < low <= middle <= high
        assert row["host us a unit"][1] > 0
        assert row["step / plain"][1] > 0
        assert row["launches"] == row["host stops"] == 0
        assert row["peak MiB"] > 0


@pytest.mark.slow
def test_ranks_of_one_device_are_compared_with_torch(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    program = [sys.executable, str(ROOT / "benchmarks/device_ranks.py"), "--ranks", "4"]
    done = subprocess.run(
        [*program, "--rounds", "1", "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(target.read_text())["rows"]
    programs = ["fully_shard", "replicate", "class", "1F1B", "hybrid"]
    assert list(rows) == [f"{name}, 4 ranks" for name in programs]
    for name, row in rows.items():
        assert f"| {name} |" in done.stdout
        assert all(low > 0 for low, _, _ in row.values())
