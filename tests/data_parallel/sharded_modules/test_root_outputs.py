"""What a sharded root returns of its last unit: the same object, with what hangs on it."""

from __future__ import annotations

import torch
from torch import nn

from meshwright import fully_shard
from meshwright.testing import Ranks


class Marked(nn.Module):
    """A layer that hangs a mask on its output, which may be sparse."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.layer, self.is_sparse = nn.Linear(6, 6), is_sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        out.mask = torch.ones(3)  # pyrefly: ignore[missing-attribute]
        return out.to_sparse() if self.is_sparse else out


class Twice(nn.Sequential):
    """A root that returns what its last unit has returned, in two places."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = super().forward(x)
        return out, out


def body() -> None:
    for is_sparse in (False, True):
        model = Twice(Marked(is_sparse=False), Marked(is_sparse=is_sparse))
        for unit in (*model, model):
            fully_shard(unit)
        first, second = model(torch.ones(4, 6))
        assert first is second
        assert is_sparse or first.mask.sum() == 3
        (first.to_dense() if is_sparse else first).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_outputs_of_the_last_unit_stay_what_they_are(ranks: Ranks) -> None:
    ranks(2, body)
