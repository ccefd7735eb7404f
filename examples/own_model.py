"""A model, data and a loss of one's own, for `meshwright train examples/own_model.toml`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

Item = tuple[torch.Tensor, torch.Tensor]


def build(width: int) -> nn.Module:
    """Called with [model.options]."""
    return nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def data() -> tuple[Sequence[Item], Sequence[Item]]:
    """The training data and what is held out: anything with __len__ and __getitem__."""
    points = torch.rand(640, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    items = [(point, point.prod(0, keepdim=True)) for point in points]
    return items[:512], items[512:]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)
