"""Scores of published runs: errors, the last line, constants without a source, and wrong rows."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.planner import score
from support.internals.planner import (
    Constants,
    fit,
    linearize,
    priors,
    published_runs,
    ranges,
    ranking,
)

ROW: dict[str, Any] = {
    "id": "sc21-5",
    "source_id": "megatron_sc21",
    "family": "39B",
    "tier": "A",
    "kind": "train_step",
    "model": {
        "name": "GPT-39B", "layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 64,
        "head_dim": 128, "ffn": 32768, "glu": False, "vocab": 51200, "seq": 2048,
        "tied_embeddings": True,
    },
    "hw": {"gpu": "A100-80GB", "gpus_per_node": 8, "inter_node_Gbps_per_gpu": 200},
    "parallel": {
        "dp": 32, "dp_replicate": 32, "dp_shard": 1, "zero_stage": 0, "tp": 8, "pp": 2, "vp": 1,
        "cp": 1, "ep": 1, "schedule": "1f1b",
    },
    "batch": {"micro": 4, "global": 1536, "num_microbatches": 12},
    "precision": "fp16",
    "recompute": "full",
    "measured": {"step_time_s": 14.453, "peak_mem_gib": 40.0, "peak_mem_kind": "max_allocated"},
    "derived": {},
}  # fmt: skip


def _file(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "runs.json").write_text(json.dumps({"rows": list(rows)}))
    return str(folder / "runs.json")


def test_a_published_run_is_predicted(tmp_path: Path) -> None:
    other = copy.deepcopy(ROW) | {"kind": "oom", "measured": {"oom": True}, "id": "small"}
    other["hw"]["mem_gb"] = 16
    unknown = copy.deepcopy(ROW) | {"color": "green"}
    unknown["hw"]["gpu"] = "TPUv4"
    found = score(_file(tmp_path, ROW, other, unknown))
    (error,) = found.times["megatron_sc21"]
    assert abs(error) < 0.15
    assert found.refused == (1, 1)
    assert found.feasible == (1, 1)
    assert found.unknown == 1
    last = found.lines()[-1]
    number = r"\d+(\.\d)? %"
    assert re.fullmatch(
        f"score: time median over sources {number}, pooled {number}, p90 {number}; "
        f"memory median {number}, p90 {number}; rows 1 of 3",
        last,
    ), last
    assert any("unknown fields ignored" in line for line in found.lines())
    assert any("allocated sc21-5" in line for line in found.lines())


def test_a_source_alone_cannot_be_left_out(tmp_path: Path) -> None:
    file = _file(tmp_path, ROW, ROW)
    with pytest.raises(PlanError, match="--leave-out: expected runs of at least two sources"):
        score(file, leave_out=True)


def test_what_a_row_leaves_open_is_the_cheapest_recompute_that_fits(tmp_path: Path) -> None:
    how = []
    for gib in (20, 60, 76, 90, 400):
        row = copy.deepcopy(ROW) | {"recompute": "unspecified"}
        row["hw"]["mem_gb"] = gib
        (run,), _, _ = published_runs(_file(tmp_path, row))
        how.append((run.question.layout.recompute, run.question.layout.recompute_share))
    assert how[:2] == [("full", 1.0), ("full", 1.0)]
    assert how[2][0] == "full" and 0 < how[2][1] < 1
    assert how[3:] == [("selective", 1.0), ("none", 0.0)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.layers", -2),
        ("model.layers", 10**6),
        ("model.hidden", "wide"),
        ("model.vocab", math.nan),
        ("model", 3),
        ("parallel.tp", 0),
        ("parallel.pp", 2.5),
        ("parallel.zero_stage", 7),
        ("batch.micro", -1),
        ("hw.mem_gb", math.inf),
        ("measured.step_time_s", -1.0),
        ("hw.gpu", 5),
    ],
)
def test_a_wrong_field_is_named_with_its_row(path: str, value: object, tmp_path: Path) -> None:
    row = copy.deepcopy(ROW)
    table, _, key = path.rpartition(".")
    (row[table] if table else row)[key] = value
    with pytest.raises(PlanError) as error:
        score(_file(tmp_path, row))
    assert path in str(error.value)
    assert "sc21-5" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text("[1, 2")
    with pytest.raises(PlanError, match="JSON"):
        score(str(tmp_path / "runs.json"))
    (tmp_path / "runs.json").write_text('{"rows": 3}')
    with pytest.raises(PlanError, match="rows"):
        score(str(tmp_path / "runs.json"))


def test_a_fit_finds_what_made_the_rows_and_leaves_out_a_source() -> None:
    truth = {"latency": 4e-5, "links": 0.9}

    def seconds(constants: Constants, size: float) -> float:
        return constants.latency + size / (3e11 * constants.links)

    sizes = [2.0**k for k in range(16, 32)]
    made = Constants(**truth)
    measured = [seconds(made, size) for size in sizes] + [1.0] * 4
    asked = [*sizes, *sizes[:4]]
    sources = ["ring"] * 16 + ["wrong"] * 4

    def predict(constants: Constants) -> list[float]:
        return [seconds(constants, a) / m for a, m in zip(asked, measured, strict=True)]

    found = priors()
    for _ in range(4):
        found = fit(linearize(predict, found), sources, without="wrong")
    for name, value in truth.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1)
    for name, (low, high) in ranges().items():
        assert low <= getattr(found, name) <= high


def test_ranks_of_a_sweep() -> None:
    rho, regret = ranking([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)])
    assert (rho, regret) == (pytest.approx(1.0), 0.0)
    rho, regret = ranking([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)])
    assert (rho, regret) == (pytest.approx(-1.0), pytest.approx(2.0))
