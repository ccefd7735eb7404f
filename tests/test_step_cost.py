"""The cost of a warm step in Python, as a bound on calls of the library's own functions."""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks
from step_cost import measure

# Outside of shared memory, where a busy machine adds calls.
MOST = {"replicate": 90, "fully_shard": 1798, "1F1B": 462, "Trainable": 196}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_step_calls_no_more_functions(ranks: Ranks, name: str) -> None:
    assert ranks(2, measure, name)[0].outside <= MOST[name]
