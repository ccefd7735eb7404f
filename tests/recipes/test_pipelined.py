"""Runs of the main job over the axis pipeline: parity, and checkpoints onto other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.testing import Ranks
from support.internals.recipes import compare_runs
from support.recipes.runs import losses, run_tiny, saved_tensors, stop_in_step

PARITY = ("run.check_parity=true", "run.parity_steps=2", "run.steps=4", "train.clip_norm=0.1")


def pipelined(schedule: str, microbatches: int, **axes: int) -> tuple[str, ...]:
    sizes = tuple(f"axes.{name}={size}" for name, size in axes.items())
    return (*sizes, f"pipeline.schedule={schedule}", f"pipeline.microbatches={microbatches}")


CASES = (
    (2, pipelined("1f1b", 4, pipeline=2)),
    (2, pipelined("interleaved1f1b", 4, pipeline=2)),
    (4, (*pipelined("zb1p", 4, pipeline=4), "model.layers=4", "train.accumulate=2")),
    (4, pipelined("zbv", 4, pipeline=2, replicate=2)),
    (4, pipelined("dualpipev", 4, pipeline=2, shard=2)),
    (4, (*pipelined("gpipe", 2, shard=2, pipeline=2), "model.activation=swiglu")),
)


QUICK = (3,)
"""One that is composed."""


@pytest.mark.parametrize(
    "number",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(len(CASES))],
)
def test_pipelines_train_the_model_of_one_process(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    world, options = CASES[number]
    outcome = ranks(world, run_tiny, tmp_path, *options, *PARITY, timeout=120)[0]
    assert "equals one process over 2 steps in float64" in outcome.parity
    assert outcome.is_finished
    assert outcome.validation_loss is not None


LONG = "run.steps=16"
"""So many that ranks agree to stop before the last, also where each step is quick."""


@pytest.mark.slow
def test_a_stopped_pipeline_goes_on_exactly(ranks: Ranks, tmp_path: Path) -> None:
    traced = ("model.dropout=0.1", "run.trace_tensors=true", LONG)
    options = (*pipelined("interleaved1f1b", 4, pipeline=2), *traced)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    ranks(2, run_tiny, whole, *options)
    stopped = ranks(2, stop_in_step, parts, 2, *options)[0]
    assert 2 <= stopped.step < 16
    ranks(2, run_tiny, parts, *options)
    assert losses(parts) == losses(whole)
    assert saved_tensors(parts) == saved_tensors(whole)
    found = compare_runs(whole / "run", parts / "run")
    assert len(found.steps) == 16
    assert found.first_bits is None


@pytest.mark.slow
def test_a_pipeline_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Stages and copies on 4 ranks, stages and parts on 4, then one process: original names."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    double = (
        "precision.parameters=float64",
        "train.clip_norm=0.5",
        "run.accept_changes=true",
        LONG,
    )
    ranks(1, run_tiny, whole, *double)
    copies = pipelined("zb1p", 4, pipeline=2, replicate=2)
    first = ranks(4, stop_in_step, parts, 1, *double, *copies)[0]
    shards = pipelined("zbv", 2, pipeline=2, shard=2)
    second = ranks(4, stop_in_step, parts, first.step + 1, *double, *shards)[0]
    assert 1 <= first.step < second.step < 16
    last = ranks(1, run_tiny, parts, *double)[0]
    assert last.is_finished
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)
    ours, theirs = saved_tensors(parts), saved_tensors(whole)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        flat = torch.tensor(values).double()
        torch.testing.assert_close(torch.tensor(ours[name]).double(), flat, rtol=1e-6, atol=1e-9)
