"""Guards under a simulated device: they look one step late, and nothing leaves before they have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.comm import communicator, settle
from meshwright.data_parallel import fully_shard
from meshwright.errors import CollectiveMismatchError
from meshwright.testing import Ranks, on_devices

LEFT_OUT = (
    "Optimizer steps differ across ranks: before forward 4 ranks .* have changed their weights"
)
LATE = "One step of an optimizer may have used its gradients"


def sharded_step() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def body_left_out(*, settles: bool) -> None:
    model, optimizer = sharded_step()
    rank = communicator().rank

    def step(number: int) -> None:
        model(torch.ones(2, 4)).sum().backward()
        if (number, rank) != (3, 1):
            optimizer.step()
        optimizer.zero_grad()

    for number in (1, 2, 3, 4):
        step(number)  # the hash of step 4 says that rank 1 has left out step 3
    with pytest.raises(CollectiveMismatchError, match=LEFT_OUT) as raised:
        settle() if settles else step(5)
    assert LATE in str(raised.value)


@pytest.mark.parametrize("settles", [True, False])
def test_a_step_that_a_rank_left_out_shows_in_the_next(ranks: Ranks, *, settles: bool) -> None:
    on_devices(ranks)(2, body_left_out, settles=settles)
