"""The optimizers of cases: torch's, in their ways to step, and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import meshwright as mw
from fuzz.cases import Case

__all__ = ["OPTIMIZERS", "optimizer_of"]


@mw.declare_element_wise
class Softened(torch.optim.Optimizer):
    """An optimizer of the user's own: a step of limited size along a mean of gradients."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(0.5).add_(parameter.grad, alpha=0.5)
                parameter.sub_(torch.tanh(state["mean"]), alpha=group["lr"])


def _lamb(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that looks at norms, of a class that no other case has used."""

    class Lamb(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            held = (each for group in self.param_groups for each in group["params"])
            for parameter in held:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(0.5).add_(parameter.grad, alpha=0.5)
                trust = (parameter.norm() + 0.1) / (state["mean"].norm() + 1)
                parameter.sub_(state["mean"] * trust, alpha=0.1)

    return Lamb(parameters, {})


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(list(parameters), lr=0.1, max_iter=2, line_search_fn="strong_wolfe")


# Wide eps: of a gradient that is rounding and nothing else no full step is made.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "decay": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
        "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3, weight_decay=0.01),
        "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
        "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-2),
        "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-2),
        "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
        "lion": Softened,
        "adafactor": partial(torch.optim.Adafactor, lr=0.01, eps=(1e-4, 1e-3)),
        "lbfgs": _lbfgs,
        "lamb": _lamb,
        "sgd single": partial(torch.optim.SGD, lr=0.1, foreach=False),
        "adam foreach": partial(torch.optim.Adam, lr=0.01, eps=1e-3, foreach=True),
        "adamw fused": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
    }
)


def optimizer_of(case: Case) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return OPTIMIZERS[case.optimizer]
