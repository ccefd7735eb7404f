"""Hooks in stages by hand: each microbatch's backward calls them as a loop in one process does."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    SplitPoint,
    get_schedule_class,
    pipeline,
)
from meshwright.pipelining.schedules import SCHEDULE_NAMES
from meshwright.testing import Ranks
from support.internals.schedule import stage_ranks

CPU, MICROBATCHES, WIDTH = torch.device("cpu"), 4, 6


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """Its sum over microbatches is not what it makes of their sum."""
    return gradient.clamp(-0.02, 0.02)


class Hooked(nn.Module):
    """A layer with a hook of every kind, also on what it is given and on what it returns."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double()
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.kind, self.calls = kind, Counter[str]()
        for name, parameter in self.body.named_parameters():
            if kind == "parameter":
                parameter.register_hook(clamp)
            if kind == "behind":
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self.calls.update([name])
                )
        if kind == "module":
            self.body.register_full_backward_hook(lambda _, given, __: (clamp(given[0]),))
            self.body[1].register_full_backward_pre_hook(lambda _, given: (given[0] * 3,))
            self.body[0].register_forward_hook(lambda _, __, output: output * 2)
            self.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "given" and x.requires_grad:
            x.register_hook(clamp)
        y = self.body(x + self.shift)  # so that what is given to it requires grad in all stages
        if self.kind == "inside":
            y.register_hook(clamp)
        y = x + y
        if self.kind == "returned":
            y.register_hook(clamp)
        return y


KINDS = ("parameter", "behind", "module", "given", "inside", "returned")


def body_by_hand(names: tuple[str, ...]) -> None:
    for name in names:
        for kind in KINDS:
            one_schedule(name, kind)


def one_schedule(name: str, kind: str) -> None:
    world, cls = communicator(), get_schedule_class(name)
    is_multi = issubclass(cls, PipelineScheduleMulti)
    count = world.size * (2 if is_multi else 1)
    layers = [Hooked(seed, kind) for seed in range(count)]
    ones = [Hooked(seed, kind) for seed in range(count)]
    holders = stage_ranks(world.size, count, "v" if "V" in name else "loop")
    mine = [stage for stage, rank in enumerate(holders) if rank == world.rank]
    stages = [PipelineStage(layers[s], s, count, CPU) for s in mine]
    schedule: Any = cls(
        stages if is_multi else stages[0],  # pyrefly: ignore
        MICROBATCHES,
        loss_fn=nn.MSELoss(reduction="sum"),
        scale_grads=False,
    )
    torch.manual_seed(9)
    x, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    for _ in range(2):
        args = (x,) if 0 in mine else ()
        schedule.step(*args, **({"target": target} if count - 1 in mine else {}))
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            nn.MSELoss(reduction="sum")(nn.Sequential(*ones)(part), goal).backward()
    for s in mine:
        assert layers[s].calls == ones[s].calls, (name, kind)
        for a, b in zip(layers[s].parameters(), ones[s].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=f"{name} {kind}")


def test_hooks_of_stages_run_for_each_microbatch(ranks: Ranks) -> None:
    ranks(2, body_by_hand, ("1F1B", "ZBVZeroBubble"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_hooks_of_stages_run_under_all_schedules(ranks: Ranks, name: str) -> None:
    ranks(2, body_by_hand, (name,))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).tanh()
        return self.c(self.b(y).tanh()) + y


def body_traced(names: tuple[str, ...]) -> None:
    rank = communicator().rank
    for name in names:
        model, calls = Plain(), Counter[str]()
        for key, parameter in model.named_parameters():
            parameter.register_hook(clamp)
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: calls.update([key]))  # noqa: B023
        one = copy.deepcopy(model)
        for parameter in one.parameters():
            parameter.register_hook(clamp)
        torch.manual_seed(9)
        x, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, dtype=torch.float64)
        pipe = pipeline(model, (x[:2],), split_spec={"c": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, CPU)
        assert all(p is model.get_parameter(n) for n, p in stage.submod.named_parameters())
        cls: Any = get_schedule_class(name)
        loss = nn.MSELoss(reduction="sum")
        stages = [stage] if issubclass(cls, PipelineScheduleMulti) else stage
        schedule = cls(stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
        schedule.step(*((x,) if rank == 0 else ()), **({} if rank == 0 else {"target": target}))
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss(one(part), goal).backward()
        held = dict(stage.submod.named_parameters())
        assert calls == dict.fromkeys(held, MICROBATCHES)
        for key, parameter in held.items():
            torch.testing.assert_close(
                parameter.grad, one.get_parameter(key).grad, rtol=1e-10, atol=1e-12, msg=key
            )


def test_traced_stages_keep_hooks_of_parameters(ranks: Ranks) -> None:
    ranks(2, body_traced, ("1F1B", "InterleavedZeroBubble"))
