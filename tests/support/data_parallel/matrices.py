"""Models and optimizers that look at whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from support.expert_parallel.samples import Block, D, Fused
from support.internals.axes import Axes

__all__ = ["D", "NewtonSchulz", "batch", "factory", "loss_of", "mixture", "mlp", "plan_of", "solo"]


class NewtonSchulz(torch.optim.Optimizer):
    """A user's own: momentum, made nearly orthogonal; leading dims are many matrices."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                moving = state.setdefault("moving", torch.zeros_like(parameter))
                moving.mul_(0.9).add_(parameter.grad)
                x = moving / (moving.norm() + 1e-9)
                for _ in range(4):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                parameter.sub_(x, alpha=group["lr"])


def mlp(rows: int = 6, layers: int = 1, last: int = 3) -> nn.Sequential:
    """Matrices of 8 rows, and two that ranks do not divide."""
    torch.manual_seed(0)
    inner = [nn.Linear(8, 8) for _ in range(layers)]
    return nn.Sequential(
        nn.Linear(D, 8), *inner, nn.Tanh(), nn.Linear(8, rows), nn.Linear(rows, last)
    ).double()


def mixture() -> nn.Sequential:
    """A chain with experts, for every axis."""
    torch.manual_seed(0)
    first = nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)
    return nn.Sequential(*first, Block(Fused(4), 2), nn.Linear(D, 6)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(step)).double()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def factory(kind: str, model: nn.Module | None = None) -> Callable[[Iterable[Any]], Any]:
    """A list: Muon, or the user's own, of the matrices; AdamW of the rest."""

    def build(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
        held = list(parameters)
        dims = (2,) if kind == "muon" else (2, 3)
        rest = torch.optim.AdamW([p for p in held if p.ndim not in dims], lr=0.05)
        matrices = [p for p in held if p.ndim in dims]
        if kind == "muon":  # a plan knows it
            return [torch.optim.Muon(matrices, lr=0.1), rest]
        own = NewtonSchulz(matrices)
        return [own if model is None else mw.own_matrices(own, model), rest]

    return build


def plan_of(axes: dict[str, int]) -> Plan:
    pipeline = PipelinePlan(schedule="1f1b", microbatches=2)
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules={"0": "colwise", "2": "rowwise"} if "tensor" in axes else None),
        pipeline=pipeline if "pipeline" in axes else PipelinePlan(),
        train=TrainPlan(clip_norm=0.5),
    )


def solo(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: Iterable[int]
) -> None:
    """Train in one process, clipping as `plan_of` says."""
    for step in steps:
        loss_of(model(batch(step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
