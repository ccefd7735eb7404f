"""Checks of failures: a rank that raises, is killed or stands still is named on all others."""

from __future__ import annotations

import torch

from gpu.places import Place
from gpu.ways import both
from meshwright.comm import Communicator
from meshwright.errors import MeshwrightError
from meshwright.testing import Ending, Fault, RanksFailed, arm

LOST = 1
LIMIT = 8.0
"""Seconds: the user's own limit, which ends the wait for a rank that stands still."""
BOUND = 60.0
"""Seconds in which every rank must have ended: the limit, and the start of the processes."""


def loses_a_rank(place: Place, world: Communicator, kind: str) -> str:
    """Train until rank 1 is struck in the forward of its third step; the others must not return."""
    run = both("fully_shard", place, world)[1]
    arm(Fault.parse(f"forward:rank={LOST}:step=2:{kind}"), rank=world.rank, module=run.model)
    for number in range(4):
        run.step(number)
    if place.is_gpu:
        torch.cuda.synchronize()
        world.barrier()  # an abort of the groups frees the host without a word
    raise AssertionError(f"rank {world.rank} has trained on without rank {LOST}")


def judge_loss(error: RanksFailed, kind: str) -> str:
    """Hold that every other rank raised our error in time, naming the lost one."""
    for outcome in error.outcomes:
        if outcome.rank == LOST:
            continue
        said = f"rank {outcome.rank} {outcome.headline()}"
        assert outcome.ending == Ending.RAISED, said
        assert isinstance(outcome.exception, MeshwrightError), said
        assert f"rank {LOST}" in str(outcome.exception), said
        assert outcome.seconds < BOUND, said
    last = max(outcome.seconds for outcome in error.outcomes if outcome.rank != LOST)
    return f"{kind}: named on {len(error.outcomes) - 1} other ranks, the last after {last:.1f} s"
