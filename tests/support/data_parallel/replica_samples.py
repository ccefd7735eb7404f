"""What tests of replicas share: data, a loss, a model with branches, a backward that fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.comm import communicator


class Branches(nn.Module):
    """Uses the layers it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)]).double()

    def forward(self, x: torch.Tensor, used: Sequence[int] = (0, 1, 2, 3)) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return x


class Breaks(torch.autograd.Function):
    """Has no backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch, and this rank's share."""
    world = communicator()
    torch.manual_seed(7)
    x = torch.randn(rows * world.size, 3, dtype=torch.float64)
    return x, x.chunk(world.size)[world.rank]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def same_gradients(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
