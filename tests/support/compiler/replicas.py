"""A small replica, its batches, and one process that has all ranks' batches, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.comm import communicator
from meshwright.compiler import aot_backend

__all__ = ["Heads", "batch", "compiled", "heads", "in_one_process", "same_as", "squared"]

WIDTH = 6


class Heads(nn.Module):
    """Two heads on one body, the second of which only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, second: bool = False) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        return self.second(x) if second else self.first(x)


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def batch(step: int, rank: int | None = None, size: int = 4) -> torch.Tensor:
    rank = communicator(None, "replicate").rank if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=aot_backend, **options)


def squared(model: Any, step: int, rank: int | None = None, **options: Any) -> torch.Tensor:
    return model(batch(step, rank), **options).square().mean()


Loss = Callable[[nn.Module, int], torch.Tensor]


def in_one_process(model: nn.Module, loss: Loss) -> None:
    """Backward of the mean over the ranks of ``loss(model, rank)``."""
    size = communicator(None, "replicate").size
    for rank in range(size):
        (loss(model, rank) / size).backward()


def same_as(expected: nn.Module, found: nn.Module) -> None:
    rows = zip(expected.named_parameters(), found.parameters(), strict=True)
    for (name, one), other in rows:
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-11, msg=name)
