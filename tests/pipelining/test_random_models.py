"""Random models under random schedules: any edges, outputs, sizes, frozen parts, one microbatch."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Source,
    StageEdges,
    get_schedule_class,
)
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import Ranks
from support.internals.schedule import stage_ranks

OUTPUTS = {"one": 1, "passed on": 2, "cut off": 3, "sum": 2}
"""By kind of a stage, how many values it gives."""


class Part(nn.Module):
    """Adds up what it reads, each with its own factor."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.body = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh()).double()

    def forward(self, *xs: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        x = sum((factor * x for factor, x in enumerate(xs[1:], 2)), start=xs[0])
        y = self.body(x) if scale is None else self.body(x) * scale
        match self.kind:
            case "one":
                return y
            case "passed on":
                return y, xs[0]
            case "cut off":
                return y.detach(), y, y * 2
            case _:
                return y + x, y


@dataclass
class Drawn:
    """One case. ``edges`` read what stages before give, and the batch."""

    name: str
    microbatches: int
    kinds: list[str]
    edges: list[StageEdges]
    rows: int
    reduction: str
    frozen: list[int]


def draw(ranks: int, dice: random.Random) -> Drawn:
    name = dice.choice(SCHEDULE_NAMES)
    is_multi = issubclass(get_schedule_class(name), PipelineScheduleMulti)
    count = ranks * (2 if "V" in name else dice.choice((1, 2, 3)) if is_multi else 1)
    microbatches = dice.choice((count, 2 * count, count + 1, ranks, 2 * ranks, 7, 3, 1))
    kinds = [dice.choice(list(OUTPUTS)) for _ in range(count - 1)] + ["one"]
    edges = [StageEdges((Source(None, 0),))]
    for stage in range(1, count):
        before = [stage - 1, *(s for s in range(stage) if dice.random() < 0.3)]
        args = [Source(s, dice.randrange(OUTPUTS[kinds[s]])) for s in before]
        args += [Source(None, 0)] if dice.random() < 0.2 else []
        kwargs = (("scale", Source(None, "scale")),) if dice.random() < 0.3 else ()
        edges.append(StageEdges(tuple(args), kwargs))
    rows = microbatches + dice.randrange(2 * microbatches)
    frozen = [s for s in range(count) if dice.random() < 0.15]
    return Drawn(name, microbatches, kinds, edges, rows, dice.choice(("mean", "sum")), frozen)


def body(seed: int, cases: int) -> int:
    """How many of ``cases`` a schedule took; one has a single microbatch whatever the seed."""
    world, dice, taken = communicator(), random.Random(seed), 0
    single = [StageEdges((Source(s - 1 if s else None, 0),)) for s in range(world.size)]
    drawn = [draw(world.size, dice) for _ in range(cases - 1)]
    for case in (Drawn("GPipe", 1, ["one"] * world.size, single, 2, "mean", []), *drawn):
        try:
            taken += one_case(case)
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
    return taken


def one_case(case: Drawn) -> bool:
    """Two steps against one process. False where the schedule takes no such microbatches."""
    world, count = communicator(), len(case.kinds)
    layers = [Part(kind, seed) for seed, kind in enumerate(case.kinds)]
    for s in case.frozen:
        layers[s].requires_grad_(False)
    ones = copy.deepcopy(layers)
    holders = stage_ranks(world.size, count, "v" if "V" in case.name else "loop")
    mine = [s for s, rank in enumerate(holders) if rank == world.rank]
    cpu = torch.device("cpu")
    stages = [PipelineStage(layers[s], s, count, cpu, edges=case.edges) for s in mine]
    kind: Any = get_schedule_class(case.name)
    loss = nn.MSELoss(reduction=case.reduction)
    given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    try:
        schedule = kind(given, case.microbatches, loss, scale_grads=case.reduction == "mean")
    except ValueError as error:
        assert "microbatches" in str(error)
        return False
    x, target = torch.randn(2, case.rows, 5, dtype=torch.float64)
    scale = torch.rand(case.rows, 1, dtype=torch.float64)
    for _ in range(2):
        last = {"target": target} if count - 1 in mine else {}
        named = {"scale": scale} if any(edges.kwargs for edges in case.edges) else {}
        schedule.step(x, **named, **last)
        values: list[tuple[torch.Tensor, ...]] = []
        for one, edges in zip(ones, case.edges, strict=True):
            args = [x if s.stage is None else values[s.stage][int(s.output)] for s in edges.args]
            value = one(*args, **({"scale": scale} if edges.kwargs else {}))
            values.append(value if isinstance(value, tuple) else (value,))
        expected = loss(values[-1][0], target)
        if expected.requires_grad:
            expected.backward()
    for s in mine:
        for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.slow
def test_random_models(ranks: Ranks) -> None:
    assert min(ranks(2, body, 0, 12)) == 11


@pytest.mark.few(0)
@pytest.mark.backends("shm", "gloo")
@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 2), (4, 3), (4, 4)])
def test_more_random_models(ranks: Ranks, size: int, seed: int) -> None:
    assert min(ranks(size, body, seed, 24, timeout=120)) > 12
