"""Steps of every schedule against their simulation, with compute that sleeps for known times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import Clock, Timer, communicator, gather_timeline, observe
from meshwright.pipelining import PipelineScheduleRuntime, PipelineStage
from meshwright.schedule import Costs, Schedule
from meshwright.testing import Ranks
from support.internals.schedule import BUILDERS, build, compare, lower, simulate
from support.internals.timeline import Timeline

FORWARD, INPUT, WEIGHT = 0.012, 0.016, 0.01
SCALES = (1, 2, 5, 12, 30, 30, 60)
"""Of the sleeps. What a busy machine adds to each action counts for less in longer ones; what the
simulation has wrong does not."""
MICROBATCHES = 8


class Sleeps(torch.autograd.Function):
    """Passes its input on, and sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """Sleeps in its forward, and in the backward on the ways to its input and to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(4)), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD * self.scale)
        weight = Sleeps.apply(self.weight, WEIGHT * self.scale)
        return Sleeps.apply(x, INPUT * self.scale) + weight


def slower(stage: int) -> float:
    """Stages differ, as those of models do."""
    return 1 + 0.2 * (stage % 3)


def length(timeline: Timeline) -> float:
    """Seconds from the first to the last compute action."""
    compute = timeline.select(lane="compute")
    return compute.end - compute.start


def pipeline(
    name: str, make: Callable[[], nn.Module], x: torch.Tensor
) -> tuple[Schedule, dict[int, nn.Module], Callable[[], object]]:
    """Return the order, this rank's stages, and a step on the batch ``x``."""
    world = communicator()
    order = build(name, world.size, MICROBATCHES)
    mine = order.stages_of(world.rank)
    layers = {stage: make() for stage in mine}
    stages = [PipelineStage(layers[s], s, order.stages, torch.device("cpu")) for s in mine]
    schedule = PipelineScheduleRuntime(stages, MICROBATCHES, nn.MSELoss(), order=order)
    given = (x,) if 0 in mine else ()
    target = {"target": x} if order.stages - 1 in mine else {}
    return order, layers, partial(schedule.step, *given, **target)


def measured(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one step, and of its simulation by the times of its actions."""
    world = communicator()
    world.barrier()
    timer = Timer(Clock())
    with observe(timer):
        step()
    found = compare(gather_timeline(timer, world))
    assert found is not None
    return length(found.measured), length(found.simulated)


def body(name: str) -> None:
    world = communicator()
    order, layers, step = pipeline(name, Layer, torch.ones(MICROBATCHES, 4))
    every = [slower(stage) for stage in range(order.stages)]
    costs = Costs(
        forward=[FORWARD * each for each in every],
        input=[0.0, *(INPUT * each for each in every[1:])],  # the batch has no gradient
        weight=[WEIGHT * each for each in every],
    )
    slept = simulate(lower(order), costs, events=False).makespan
    step()
    differences: list[tuple[float, float]] = []
    for scale in SCALES:
        for stage, layer in layers.items():
            layer.scale = scale * slower(stage)
        took, simulated = measured(step)
        differences.append((took / (scale * slept) - 1, took / simulated - 1))
        if max(map(abs, differences[-1])) <= 0.03:
            break
    if world.rank == 0:
        print(
            f"{name} on {world.size} ranks, {took:.2f} s: {differences[-1][0]:+.1%} with the "
            f"sleeps, {differences[-1][1]:+.1%} with the measured costs"
        )
    assert max(map(abs, differences[-1])) <= 0.03, differences


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_takes_as_long_as_it_is_simulated(ranks: Ranks, name: str, size: int) -> None:
    ranks(size, body, name, timeout=300.0)


def body_computes(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)))

    _, _, step = pipeline(name, make, torch.ones(MICROBATCHES * 256, 512))
    step()
    differences = [took / simulated - 1 for took, simulated in (measured(step) for _ in range(9))]
    if communicator().rank == 0:
        print(f"{name}: {statistics.median(differences):+.1%} with the measured costs")
    assert abs(statistics.median(differences)) <= 0.15, differences


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_that_computes_takes_as_long_as_it_is_simulated(ranks: Ranks, name: str) -> None:
    ranks(2, body_computes, name)
