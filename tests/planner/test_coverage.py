"""What each planner can express: the table of the docs is the program's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from planner.test_published import ROW

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks/planner_coverage.py"


@pytest.fixture(scope="module")
def coverage() -> Any:
    spec = importlib.util.spec_from_file_location("planner_coverage", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**changes: Any) -> dict[str, Any]:
    """A row of FSDP on 8 GPUs, or of another layout."""
    plain = {"dp": 8, "dp_shard": 8, "zero_stage": 3, "tp": 1, "pp": 1, "schedule": "none"}
    extras = changes.pop("extras", {})
    arch, kind = changes.pop("arch", "dense"), changes.pop("kind", "train_step")
    parallel = {**plain, **changes}
    return {"kind": kind, "model": {"arch": arch}, "extras": extras, "parallel": parallel}


def test_the_docs_have_the_table_of_the_program(coverage: Any) -> None:
    counts = json.loads(coverage.KEPT.read_text())
    assert sum(counts.values()) == 669
    assert coverage.table(counts) in (ROOT / "docs/planner.md").read_text()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, {"FSDP"}),
        ({"zero_stage": 2}, {"FSDP"}),
        ({"zero_stage": 2, "pp": 2}, {"replicas", "shared optimizer", "pipeline"}),
        ({"zero_stage": 0, "dp": 1, "pp": 8, "schedule": "zb2p"}, {"pipeline", "zero-bubble"}),
        (
            {"zero_stage": 0, "dp": 1, "pp": 8, "schedule": "1f1b+vocab-2"},
            {"pipeline", "vocabulary by stage"},
        ),
        (
            {"zero_stage": 0, "dp": 1, "pp": 8, "extras": {"layer_layout": "made to balance"}},
            {"pipeline", "vocabulary by stage"},
        ),
        ({"tp": 2, "cp": 4, "arch": "moe"}, {"FSDP", "tensor", "context", "experts"}),
        ({"tp": None}, None),
        ({"kind": "layer_microbench"}, None),
    ],
)
def test_a_layout_needs(changes: dict[str, Any], needed: set[str] | None, coverage: Any) -> None:
    assert coverage.needs(row(**changes)) == needed


def test_a_row_of_the_format_is_read(coverage: Any) -> None:
    assert coverage.needs(ROW) == {"replicas", "tensor", "pipeline"}


def test_a_planner_expresses_the_rows_whose_needs_it_knows(coverage: Any) -> None:
    counts = coverage.counted([row(), row(), row(tp=2), row(cp=4, arch="moe"), row(tp=None)])
    assert counts == {"FSDP": 2, "FSDP, context, experts": 1, "FSDP, tensor": 1}
    lines = coverage.table(counts).splitlines()
    assert lines[0].startswith("| Planner | Rows, 4 | FSDP, 4 | context, 1 | zero-bubble, 0 |")
    shares = {line.split(" | ")[0][2:]: line.split(" | ")[1:4] for line in lines[2:]}
    assert shares["this one"] == ["100 %", "4", "1"]
    assert shares["SimAI"] == ["75 %", "3", "0"]
    assert shares["torchtitan's estimator"] == ["50 %", "2", "0"]
    assert shares["Calculon"] == ["0 %", "0", "0"]
