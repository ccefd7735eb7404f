"""The example of experts, for ten steps; tests/soak/experts.py takes all 300."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.comm import connect
from meshwright.errors import PlanError
from meshwright.testing import Ranks
from support.internals.recipes import RunOutcome, TrainConfig, read_config, train
from support.recipes.experts import apart, curve_of_metrics, curve_of_one_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "experts.toml"


def config_in(folder: Path) -> TrainConfig:
    return read_config(
        EXAMPLE,
        [
            f"run.folder={folder}",
            "run.steps=10",
            "run.parity_steps=2",
            "precision.parameters=float64",
            "optimizer.warmup_steps=2",
            "data.max_bytes=200000",
            "data.batch_size=8",
            "data.validation_windows=4",
        ],
    )


def train_briefly(folder: Path) -> RunOutcome:
    return train(config_in(folder), connect(), lambda line: None)


@pytest.mark.slow
def test_four_ranks_train_experts_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    outcome = ranks(4, train_briefly, tmp_path)[0]
    assert outcome.parity.startswith("parity: expert=4 equals one process over 2 steps in float64")
    ours, theirs = curve_of_metrics(tmp_path), curve_of_one_process(config_in(tmp_path))
    assert apart(ours.losses, theirs.losses)[-1] < 1e-9
    assert apart(ours.imbalances, theirs.imbalances)[-1] < 1e-6
    assert max(ours.imbalances) > 1.1
    assert ours.losses[-1] < ours.losses[0] - 0.5
    assert "Tokens of the busiest expert" in Path(outcome.report).read_text(encoding="utf-8")


def test_parity_refuses_biases_that_one_process_does_not_move() -> None:
    with pytest.raises(PlanError, match=r"moves no biases of routers: leave it out, or \[expert\]"):
        read_config(EXAMPLE, ["expert.bias_rate=0.001"])
