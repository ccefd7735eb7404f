"""The optimizer of the main job and its learning rate: AdamW, linear warm-up, cosine decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.nn import Parameter

from meshwright.recipes.config import OptimizerConfig

__all__ = ["adamw", "learning_rate", "set_learning_rate"]


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Find the rate of step ``step`` (the first is 1) in a run of ``steps``.

    It rises linearly to ``config.learning_rate`` over the warm-up, then falls along half a cosine
    to ``final_fraction`` of it at the last step (Loshchilov and Hutter, 2017).
    """
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of ``optimizer`` this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def adamw(config: OptimizerConfig) -> Callable[[Iterable[Parameter]], torch.optim.Optimizer]:
    """Make a factory, for ``parallelize`` to call with this rank's parameters: AdamW that decays
    matrices only.
    """

    def build(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        owned = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in owned if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in owned if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
        )

    return build
