"""The configuration of `make train`, for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.comm import connect
from meshwright.testing import Ranks
from support.internals.recipes import RunOutcome, read_config, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"


LAYOUTS = {
    "replicate=4": ("axes.replicate=4",),
    "replicate=1, shard=4": ("axes.replicate=1", "axes.shard=4"),
    "replicate=2, shard=2": ("axes.replicate=2", "axes.shard=2"),
}


def train_briefly(folder: Path, layout: str) -> RunOutcome:
    overrides = [
        *LAYOUTS[layout],
        f"run.folder={folder}",
        "run.steps=2",
        "run.parity_steps=1",
        "data.max_bytes=200000",
        "data.validation_windows=4",
    ]
    return train(read_config(EXAMPLE, overrides), connect(), lambda line: None)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_example_trains_on_four_ranks_and_checks_parity(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    outcomes = ranks(4, train_briefly, tmp_path, layout)
    assert all(outcome.is_finished for outcome in outcomes)
    assert outcomes[0].parity.startswith(f"parity: {layout} equals one process over 1 step in")
    assert Path(outcomes[0].trace).is_file()
