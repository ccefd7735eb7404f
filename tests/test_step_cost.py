"""The cost of a warm step in Python, as bounds on what it runs of the library's own code."""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks
from step_cost import Walk, measure, walk

# Outside of shared memory, where a busy machine adds calls.
MOST = {"replicate": 90, "fully_shard": 1140, "1F1B": 315, "Trainable": 170}

# What a reader of one pass has to read. Reductions lower these numbers; nothing raises them.
WALKS = {
    "fully_shard": Walk(above=89, files_above=15, functions=126, files=26),
    "replicate": Walk(above=59, files_above=13, functions=74, files=20),
    "1F1B": Walk(above=64, files_above=8, functions=86, files=13),
}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_step_calls_no_more_functions(ranks: Ranks, name: str) -> None:
    assert ranks(2, measure, name)[0].outside <= MOST[name]


@pytest.mark.parametrize("name", WALKS)
def test_one_pass_runs_no_more_functions_and_files(ranks: Ranks, name: str) -> None:
    found, most = ranks(2, walk, name)[0], WALKS[name]
    assert all(number <= bound for number, bound in zip(found, most, strict=True)), found
