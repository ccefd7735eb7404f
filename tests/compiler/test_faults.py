"""A rank that is lost in the middle of a compiled backward pass is named by the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from meshwright.comm import communicator
from meshwright.data_parallel import replicate
from meshwright.testing import Ranks, RanksFailed
from support.compiler.replicas import batch, compiled, heads
from support.internals.data_parallel import Marking


def body(victim: int, is_killed: bool) -> None:
    """The victim is lost after all ranks have agreed what to reduce, before it reduces anything."""
    agree, steps = Marking.agree, []

    def agree_and_fail(self: Marking, indices: Sequence[int], plan: str) -> None:
        agree(self, indices, plan)
        steps.append(plan)
        if communicator().rank == victim and len(steps) == 2:
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a fault in the graph")

    Marking.agree = agree_and_fail  # pyrefly: ignore[bad-assignment]
    model = compiled(replicate(heads()))
    for step in range(3):
        model(batch(step)).square().mean().backward()


@pytest.mark.parametrize(
    "ranks", ["shm", pytest.param("gloo", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    ("victim", "is_killed"), [pytest.param(0, False, marks=pytest.mark.slow), (1, True)]
)
def test_a_rank_lost_inside_of_a_graph_is_named(ranks: Ranks, victim: int, is_killed: bool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, victim, is_killed, grace=8.0)
    lost, other = caught.value.outcomes[victim], caught.value.outcomes[1 - victim]
    assert lost.signal == (signal.SIGKILL if is_killed else None)
    error = other.exception
    assert error is not None
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert f"rank {victim} failed first" in told or f"rank {victim} (process" in told
    assert "a fault in the graph" in told or is_killed
