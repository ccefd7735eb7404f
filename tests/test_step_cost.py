"""The cost of a warm step in Python, as bounds on what it runs of the library's own code."""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks
from step_cost import Walk, measure, walk

# Outside of shared memory, where a busy machine adds calls.
MOST = {"replicate": 85, "fully_shard": 980, "1F1B": 300, "Trainable": 160}

# What a reader of one pass has to read. Reductions lower these numbers; nothing raises them.
WALKS = {
    "fully_shard": Walk(above=85, files_above=14, functions=116, files=24),
    "replicate": Walk(above=53, files_above=10, functions=66, files=16),
    "1F1B": Walk(above=64, files_above=8, functions=84, files=12),
}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_step_calls_no_more_functions(ranks: Ranks, name: str) -> None:
    assert ranks(2, measure, name)[0].outside <= MOST[name]


@pytest.mark.parametrize("name", WALKS)
def test_one_pass_runs_no_more_functions_and_files(ranks: Ranks, name: str) -> None:
    found, most = ranks(2, walk, name)[0], WALKS[name]
    assert all(number <= bound for number, bound in zip(found, most, strict=True)), found
