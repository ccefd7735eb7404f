"""`meshwright train` with its loss in chunks: the losses of a run that has all logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.comm import connect
from meshwright.testing import Ranks
from support.internals.recipes import read_config, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "context.toml"
SHORT = (
    *("run.steps=4", "run.parity_steps=2", "precision.parameters=float64"),
    *("optimizer.warmup_steps=2", "data.max_bytes=200000", "data.batch_size=4"),
    *("data.validation_windows=3", "model.context=64"),
)


def losses_of(folder: Path, *options: str) -> tuple[str, list[float]]:
    """What a run says of parity, and its losses, of held-out windows last."""
    config = read_config(EXAMPLE, [f"run.folder={folder}", *SHORT, *options])
    outcome = train(config, connect(), lambda line: None)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return outcome.parity, [*(row["loss"] for row in rows), outcome.validation_loss or 0.0]


@pytest.mark.slow
def test_a_run_with_parts_of_windows_has_the_losses_of_all_logits(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, alone = ranks(1, losses_of, tmp_path / "one", "axes.context=1")[0]
    parity, found = ranks(2, losses_of, tmp_path / "parts", "train.loss_chunk=10")[0]
    assert "equals one process over 2 steps in float64" in parity
    assert found == pytest.approx(alone, rel=1e-9)
