"""What the planner says of a run beside what the run measures, and the plan that it chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from meshwright import Plan, PlanError
from meshwright.comm import connect
from meshwright.planner import Hardware, load_hardware
from meshwright.testing import Ranks
from support.internals.cli import planned
from support.internals.planner import GIB, best_plan, predict, require_machine
from support.internals.recipes import LanguageModel, ModelConfig, TrainConfig, open_task, train
from support.recipes.runs import CONFIG, read_run, write_text

LANES = ("compute", "gather", "reduce", "transfer")
CATEGORIES = ("parameters", "gradients", "optimizer", "units", "activations")
FILE = """
name = "cpu"
memory_gib = 4.0
peak_tflops = 0.02
matmul_tflops = 0.02
matmul_fp32_tflops = 0.05
memory_gbps = 8.0
processors = 1
node = 2
intra_gbps = 1.0
inter_gbps = 1.0
[constants]
product_ampere = 1.0
half_size = 25.0
launch = 4e-06
links = 1.0
latency = 0.0003
"""


def known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Make the machine of `FILE` this one."""
    file = folder / "meshwright" / "hardware.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(FILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return load_hardware(str(file))


def comparison(folder: Path) -> dict[str, dict[str, tuple[float, float]]]:
    found = json.loads((folder / "prediction.json").read_text())
    assert tuple(found["time"]) == LANES
    assert tuple(found["memory"]) == CATEGORIES
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "predicted and measured" in page
    for name in (*(f"lane {lane}" for lane in LANES), *CATEGORIES):
        assert f"<td>{name}</td>" in page
    return found


def adapted() -> nn.Module:
    """A model of which the head and one of two layers train."""
    model = LanguageModel(ModelConfig(layers=2, heads=2, dim=16, context=16))
    for part in (model.embedding, *model.layers[1:]):
        part.requires_grad_(False)
    return model


def run_predicted(folder: Path, chosen: bool, *overrides: str) -> str:
    """A run on this rank: in the layout of ``overrides``, or in the planner's."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        world = connect()
        config = read_run(folder, *overrides, *([] if chosen else ["run.predict=true"]))
        if chosen:
            config = planned(config, world.size)
        outcome = train(config, world, lambda line: None)
        assert (outcome.mfu is None) == (world.rank > 0)
        return str(config.plan.axes)
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.mark.devices("host", reason="the known machine is a CPU; devices keep one unit more")
@pytest.mark.few(3, slow=3)
@pytest.mark.parametrize(
    "layout",
    [
        ["axes.replicate=2"],
        ["axes.shard=2", "train.accumulate=2"],
        ["axes.shard=2", 'train.recompute=["layers.*"]', "train.clip_norm=1.0"],
        ["axes.shard=2", "shard.reshard_after_forward=false"],
        ["axes.shard=2", "model.factory=recipes.test_predicted:adapted"],
        ["axes.replicate=2", "model.factory=recipes.test_predicted:adapted"],
    ],
    ids=" ".join,
)
def test_memory_is_what_was_predicted(
    layout: list[str], ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(tmp_path, monkeypatch)
    ranks(2, run_predicted, tmp_path, False, *layout)
    found = comparison(tmp_path / "run")
    for name in ("parameters", "gradients"):
        predicted, measured = found["memory"][name]
        assert predicted == measured
    predicted, measured = found["memory"]["optimizer"]
    assert predicted == pytest.approx(measured, rel=0.03)  # and a count of steps each
    assert found["memory"]["activations"][0] == pytest.approx(
        found["memory"]["activations"][1], rel=0.02
    )
    predicted, measured = found["memory"]["units"]
    # Measured has padding; units that do not train are not all gathered in the backward.
    is_frozen = any("factory" in each for each in layout)
    assert predicted == pytest.approx(measured, rel=0.4 if is_frozen else 0.03)
    for name, (predicted, measured) in found["time"].items():
        is_idle = name == "transfer" or ("replicate" in layout[0] and name == "gather")
        assert (predicted > 0, measured > 0) == (not is_idle, not is_idle)


def test_the_planners_plan_trains_on_two_ranks(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(tmp_path, monkeypatch)
    layouts = ranks(2, run_predicted, tmp_path, True)
    assert layouts[0] == layouts[1] and layouts[0].endswith(" = 2")
    comparison(tmp_path / "run")


@pytest.mark.slow
def test_the_planners_plan_trains_on_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(tmp_path, monkeypatch)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    text = write_text(tmp_path)
    words = ["train", "tiny.toml", "--plan", "auto", "--nproc", "4", "--run.folder=run"]
    command = [sys.executable, "-m", "meshwright", *words, f"--data.path={text}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan auto: " in done.stdout and "on 4 ranks" in done.stdout
    assert "MFU" in done.stdout
    comparison(tmp_path / "run")


# ------------------------------------------------------------------------------- the choice


def config(folder: Path, *overrides: str) -> TrainConfig:
    return read_run(folder, "data.batch_size=16", *overrides)


def test_what_needs_less_is_chosen_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = known(tmp_path, monkeypatch)
    given = config(tmp_path)
    trace = open_task(given).trace(8)
    best = best_plan(trace, given.plan, machine, 2, 8)
    assert best.plan.train == given.plan.train
    short = replace(machine, memory_gib=0.7 * best.total / GIB)
    less = best_plan(trace, given.plan, short, 2, 8)
    assert less.total < 0.7 * best.total
    assert less.lanes["compute"] >= best.lanes["compute"]
    assert "accumulate" in str(less)
    none = replace(machine, memory_gib=1e-6)
    with pytest.raises(PlanError, match="nothing fits: the least of .* plans needs") as error:
        best_plan(trace, given.plan, none, 2, 8)
    assert any(f"for {name}" in str(error.value) for name in CATEGORIES)


def test_more_ranks_than_cores_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = known(tmp_path, monkeypatch)
    trace = open_task(config(tmp_path)).trace(8)
    plan = Plan.from_toml("axes.replicate = 4")
    alone, shared = (predict(trace, plan, each) for each in (machine, machine.shared(4)))
    assert shared.lanes["compute"] > 1.5 * alone.lanes["compute"]
    assert machine.shared(2) == machine
    assert machine.shared(8).memory_gib == machine.memory_gib / 4


def test_a_device_still_uses_the_unit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = known(tmp_path, monkeypatch)
    trace = open_task(config(tmp_path)).trace(8)
    plan = Plan.from_toml("axes.shard = 2")
    host, device = (
        predict(trace, plan, each).memory["units"]
        for each in (machine, replace(machine, name="h100"))
    )
    assert device - host == 4 * sorted(unit.parameters for unit in trace.units)[-4] > 0


def test_what_auto_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(tmp_path, monkeypatch)
    with pytest.raises(PlanError, match="batch_size = 16 cannot be shared by 3 ranks"):
        planned(config(tmp_path), 3)
    piped = config(tmp_path, "axes.pipeline=2")
    with pytest.raises(PlanError, match="pipeline: --plan auto"):
        planned(piped, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(PlanError, match="meshwright plan --calibrate"):
        require_machine("cpu")


def test_a_trace_is_of_the_precision_of_the_run(tmp_path: Path) -> None:
    whole, half = (
        open_task(config(tmp_path, f"precision.parameters={dtype!r}")).trace(4)
        for dtype in ("float32", "bfloat16")
    )
    assert whole.flops == half.flops
    assert 0.4 * whole.saved() < half.saved() < 0.7 * whole.saved()
