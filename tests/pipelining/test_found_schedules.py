"""Schedules found for given costs, in the runtime, against one process."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import PipelineScheduleRuntime, PipelineStage
from meshwright.schedule import Costs, Schedule, find_schedule
from meshwright.testing import Ranks

CPU = torch.device("cpu")


def found_for(seed: int, ranks: int) -> Schedule:
    """A schedule for drawn costs of each stage, in about the memory of 1F1B."""
    dice = random.Random(seed)
    chunks = dice.choice((1, 2))

    def each() -> list[float]:
        return [dice.uniform(0.5, 2.0) for _ in range(ranks * chunks)]

    costs = Costs(
        forward=each(), input=each(), weight=each(), transfer=0.1, activation=1.0 / chunks
    )
    limits = [float(ranks)] * ranks
    return find_schedule(ranks, 2 * ranks, costs, chunks=chunks, limits=limits, tries=50)


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def body_as_one_process(seeds: tuple[int, ...]) -> None:
    world = communicator()
    for seed in seeds:
        order = found_for(seed, world.size)
        layers = [Layer(s) for s in range(order.stages)]
        ones = copy.deepcopy(layers)
        mine = order.stages_of(world.rank)
        stages = [PipelineStage(layers[s], s, order.stages, CPU) for s in mine]
        schedule = PipelineScheduleRuntime(stages, order.microbatches, nn.MSELoss(), order=order)
        assert schedule.schedule.rows == order.rows
        draw = torch.Generator().manual_seed(seed)
        x, target = torch.randn(2, 2 * order.microbatches, 8, dtype=torch.float64, generator=draw)
        first, last = 0 in mine, order.stages - 1 in mine
        losses: list[torch.Tensor] = []
        one = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in ones]
        many = [torch.optim.SGD(layers[s].parameters(), lr=0.1) for s in mine]
        for _ in range(3):
            out = schedule.step(
                *((x,) if first else ()), losses=losses, **({"target": target} if last else {})
            )
            expected = nn.Sequential(*ones)(x)
            loss = nn.functional.mse_loss(expected, target)
            loss.backward()
            if last:
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(torch.stack(losses).mean(), loss)
            for s in mine:
                for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
            for optimizer in (*one, *many):
                optimizer.step()
                optimizer.zero_grad()


def test_a_found_schedule_trains_as_one_process(ranks: Ranks) -> None:
    assert found_for(7, 2).name == "automatic"
    ranks(2, body_as_one_process, (7,))


@pytest.mark.slow
def test_ten_found_schedules_train_as_one_process(ranks: Ranks) -> None:
    seeds = (0, 1, 3, 4, 5, 6, 7, 8, 9, 11)
    assert {found_for(seed, 4).name for seed in seeds} == {"automatic"}
    ranks(4, body_as_one_process, seeds, timeout=300.0)


def body_refused() -> None:
    world = communicator()
    stage = PipelineStage(Layer(0), world.rank, 2, CPU)
    order = find_schedule(2, 4, Costs())
    with pytest.raises(ValueError, match="order has 2 stages and 4 microbatches, expected 2 and 8"):
        PipelineScheduleRuntime([stage], 8, nn.MSELoss(), order=order)


def test_an_order_of_another_number_of_microbatches_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused)
