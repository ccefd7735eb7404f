"""The one table of the benchmarks: what asks for work stands first."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks/bench.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("bench", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench", module)
    spec.loader.exec_module(module)
    return module


def test_rows_in_which_torch_is_ahead_are_first_then_those_that_miss_their_aim(bench: Any) -> None:
    names = {
        "met": next(iter(bench.AIMS)),
        "missed": "tensor small, SGD: ours shm over bare shm, CPU",
        "too little": next(iter(bench.LEAST)),
        "without an aim": "something",
        "behind": "transfers, GPipe: ours gloo over torch, cpu",
        "later": "first use, s: fully_shard more than fsdp2",
    }
    medians = {
        "later": 0.1,
        "met": 0.5,
        "missed": 1.5,
        "too little": 1.0,
        "without an aim": 9.0,
        "behind": 1.5,
    }
    figures = [bench.Figure(names[each], medians[each], 0.1, 2.0) for each in names]
    lines = bench.table(figures).splitlines()[2:]
    assert [line.split(" | ")[0][2:] for line in lines] == [
        names[each] for each in ("behind", "later", "missed", "too little", "met", "without an aim")
    ]
    assert lines[0].endswith("| torch ahead |")
    assert lines[1].endswith("| torch ahead |")
    assert lines[2].endswith("| 1.5 (0.1..2) | at most 1.2 | bare 1 | missed |")
    assert lines[3].endswith("| at least 2 |  | missed |")


def test_a_row_has_the_limit_that_its_program_gave(bench: Any) -> None:
    figure = bench.Figure("gpt, shm: replicate over torch's best, CPU", 0.9, 0.8, 1.0, "plain 0.72")
    assert figure.row().endswith("| at most 0.93 | plain 0.72 |  |")


def test_every_program_that_it_names_is_there(bench: Any) -> None:
    for run in bench.RUNS:
        assert (PROGRAM.parent / run.words[0]).is_file()


@pytest.mark.slow
def test_a_part_of_it_runs_and_writes_what_it_prints(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    words = ["--only", "checkpoints over raw", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "QUICK": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(target.read_text())
    assert len(rows) == 6
    for row in rows:
        assert f"| {row['name']} | " in done.stdout
        assert 0 < row["low"] <= row["median"] <= row["high"]
    assert rows[0]["aim"] == "at most 3"
