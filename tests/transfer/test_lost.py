"""A rank that is lost in a transfer is named within seconds, and the old weights stay."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import fully_shard
from meshwright.comm import communicator, observe
from meshwright.errors import CollectiveTimeoutError, RankFailedError
from meshwright.mesh import DeviceMesh
from meshwright.testing import Ending, Ranks, RanksFailed
from meshwright.transfer import Publisher, Receiver
from support.internals.timeline import Collective

VICTIMS = (0, 2)
"""A publisher and a receiver of two each."""
MOMENTS = range(12)
"""Operations of the victim before it is killed: four agree, six move weights, two compare."""


class Killer:
    """Kills its rank when it is about to issue an operation."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def issued(self, collective: Collective) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def completed(self, *_: object) -> None:
        pass


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))


@pytest.mark.few(2, slow=6)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_is_named_and_the_old_weights_stay(
    ranks: Ranks, victim: int, moment: int
) -> None:
    def body() -> None:
        rank = communicator().rank
        side = rank // 2
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = model_of(side)
        for layer in model:
            fully_shard(layer, mesh=DeviceMesh.from_group(groups[side], "cpu"))
        end = Receiver(model) if side else Publisher(model)
        before = [value.to_local().clone() for value in model.state_dict().values()]
        if rank == victim:
            with observe(Killer(moment)):
                end.receive() if isinstance(end, Receiver) else end.publish(1)
            raise AssertionError(f"moment {moment} is after the transfer")
        start = time.monotonic()
        try:
            end.receive() if isinstance(end, Receiver) else end.publish(1)
        finally:
            assert time.monotonic() - start < 5
            now = [value.to_local() for value in model.state_dict().values()]
            assert all(map(torch.equal, before, now)) and end.version is None
            if victim // 2 != side:  # the other side goes on with what it has
                inputs = torch.ones(1, 8)
                assert torch.equal(model(inputs), model_of(side)(inputs))

    with pytest.raises(RanksFailed) as caught:
        ranks(4, body, grace=8.0)
    assert len(caught.value.outcomes) == 4
    for outcome in caught.value.outcomes:
        if outcome.rank == victim:
            assert outcome.ending == Ending.DIED and outcome.signal == signal.SIGKILL
        else:
            error = outcome.exception
            assert isinstance(error, RankFailedError) and error.rank == victim, outcome.details()


def test_a_publisher_that_does_not_come_is_named(ranks: Ranks) -> None:
    def body() -> None:
        if communicator().rank == 0:
            time.sleep(3)
            return
        model = model_of(1)
        with pytest.raises(CollectiveTimeoutError, match="rank 0 has not issued it"):
            Receiver(model).receive(timeout=1.0)
        assert torch.equal(model[0].weight, model_of(1)[0].weight)

    ranks(2, body)


def test_an_error_of_one_end_is_named_by_the_others(ranks: Ranks) -> None:
    def body() -> None:
        rank = communicator().rank
        names = (lambda name: "one") if rank else "model"
        end = Receiver(model_of(1), names=names) if rank else Publisher(model_of(0))
        end.receive() if isinstance(end, Receiver) else end.publish(1)

    with pytest.raises(RanksFailed) as caught:
        ranks(2, body, grace=8.0)
    first, second = caught.value.outcomes
    assert isinstance(second.exception, ValueError)
    assert "expected another name for each tensor" in str(second.exception)
    assert isinstance(first.exception, RankFailedError) and first.exception.rank == 1
