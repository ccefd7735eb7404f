"""The cost of a warm step in Python, as a bound on calls of the library's own functions."""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks
from step_cost import measure

# The counts of this version, and a few more for waits that take longer on a busy machine.
MOST = {"replicate": 216, "fully_shard": 2900, "1F1B": 900, "Trainable": 360}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_step_calls_no_more_functions(ranks: Ranks, name: str) -> None:
    assert min(ranks(2, measure, name)) <= MOST[name]
