"""On a device the host waits once a layer: for the counts, which say how many rows come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright import fully_shard
from meshwright.comm import communicator
from meshwright.testing import Ranks
from meshwright.testing.simulated import device_of
from support.expert_parallel.samples import Block, D, Fused, over


def body_waits() -> None:
    """Rows of other numbers on each rank; accesses that are not ordered fail the test."""
    world = communicator()
    torch.manual_seed(0)
    model: Any = nn.Sequential(over(Block(Fused(4), 2)), nn.Linear(D, D)).to(world.device)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5 + world.rank, D, device=world.device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    device = device_of(world)
    before = len(device.stops)
    step()
    found = [str(stop) for stop in device.stops[before:]]
    assert len(found) == 1, found
    assert "plan_route" in found[0] or "exchange.py" in found[0], found


@pytest.mark.devices("simulated", reason="a host waits for no device")
def test_the_host_waits_once_a_layer(ranks: Ranks) -> None:
    ranks(2, body_waits)
