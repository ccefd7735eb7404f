from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import connect
from meshwright.errors import ParityError
from meshwright.testing import Ranks
from support.internals.recipes import TOLERANCE, Parity, check_parity, open_task, parity
from support.internals.reference import ReferenceRun
from support.recipes.runs import read_run, run_tiny

OPTIONS = ("axes.replicate=2", "train.accumulate=2", "train.clip_norm=0.1", "model.dropout=0.1")


def compare(folder: Path, tolerance: float) -> Parity | str:
    config = read_run(folder, *OPTIONS, f"run.parity_tolerance={tolerance}")
    try:
        return check_parity(open_task(config), connect())
    except ParityError as error:
        return str(error)


def test_the_one_process_computes_where_the_batches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``meta`` stands for a GPU."""
    seen: list[str] = []

    def looked(model: nn.Module, *_: object, **__: object) -> ReferenceRun:
        seen.extend({parameter.device.type for parameter in model.parameters()})
        return run

    run = ReferenceRun(losses=(), gradients=(), norms=(), weights={})
    config = read_run(tmp_path, *OPTIONS)
    communicator: Any = SimpleNamespace(device=torch.device("meta"), size=1)
    monkeypatch.setattr(parity, "train_reference", looked)
    parity._compare(run, open_task(config), communicator, TOLERANCE)
    assert seen == ["meta"]


def compare_another_text(folder: Path) -> str:
    """Rank 1 reads other bytes than the one process does."""
    world = connect()
    config = read_run(folder, *OPTIONS)
    if world.rank == 1:
        (folder / "other.txt").write_bytes(bytes(range(256)) * 80)
        config = read_run(folder, *OPTIONS, f"data.path={folder / 'other.txt'}")
    with pytest.raises(ParityError) as caught:
        check_parity(open_task(config), world)
    return str(caught.value)


def test_two_ranks_train_the_model_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, compare, tmp_path, TOLERANCE)
    assert isinstance(first, Parity)
    assert first == second
    assert first.error < TOLERANCE
    assert len(first.losses) == 6
    line = first.line([first.losses[0] * (1 + 1e-7), *first.losses[1:]])
    assert "replicate=2 equals one process over 6 steps" in line
    assert "differ from them by 1.0e-07" in line


def test_a_difference_names_the_first_tensor_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, compare, tmp_path, 1e-18):
        assert isinstance(message, str)
        assert "differs from one process" in message
        assert "step 1" in message


@pytest.mark.slow
def test_other_batches_are_found_out(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, compare_another_text, tmp_path):
        assert message.startswith("step 1: the loss differs from one process")


def test_a_run_tells_its_own_difference_too(ranks: Ranks, tmp_path: Path) -> None:
    options = ("axes.replicate=2", "run.check_parity=true", "run.parity_steps=3")
    outcome = ranks(2, run_tiny, tmp_path, *options)[0]
    assert "over 3 steps in float64" in outcome.parity
    assert "the real run's first 3 steps differ from them by" in outcome.parity


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tensor=4", "tensor=2,shard=2", "tensor=2,pipeline=2"])
def test_runs_over_tensor_ranks_train_the_model_of_one_process(
    ranks: Ranks, tmp_path: Path, axes: str
) -> None:
    options = [f"axes.{axis}" for axis in axes.split(",")]
    options += ["tensor.rules=language-model", "model.heads=4", "train.clip_norm=0.1"]
    options += ["run.check_parity=true", "run.parity_steps=2", "run.steps=2"]
    options += ["pipeline.microbatches=2"] if "pipeline" in axes else []
    outcome = ranks(4, run_tiny, tmp_path, *options, timeout=120)[0]
    assert "equals one process over 2 steps in float64" in outcome.parity
    assert outcome.is_finished
