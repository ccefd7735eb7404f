"""`parallelize` over axis tensor: ranks of one model train on the same values, or are stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import communicator
from meshwright.composition import Trainable, parallelize
from meshwright.errors import LayoutError, PlanError
from meshwright.plan import Plan, TensorPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.late import raises_by_now

ROWS = torch.linspace(-1, 1, 24).view(6, 4)


class Scaled(nn.Module):
    """While it trains, from a forward on, a parameter is used on features that are cut."""

    def __init__(self, begins: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.full((), 2.0))
        self.register_buffer("left", torch.tensor(begins))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.training and self.left < 0:
            hidden = hidden * self.scale
        self.left -= 1
        return self.down(hidden) * self.scale


class Noisy(Scaled):
    """Draws random numbers while it trains."""

    def __init__(self) -> None:
        super().__init__(100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand_like(x) if self.training else x)


def laid_out(model: nn.Module, rows: int = 6) -> Trainable:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    rules: Any = {"up": "colwise", "down": "rowwise"}
    plan = Plan(axes=Axes.of({"tensor": 2}), tensor=TensorPlan(rules=rules))
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "loss": F.mse_loss}
    return parallelize(model, plan, example=(ROWS[:rows],), **options)


def test_a_branch_of_training_is_compared_with_the_whole_model(ranks: Ranks) -> None:
    def body() -> None:
        with pytest.raises(PlanError, match="gradient of 'scale' of the model cut .* differs"):
            laid_out(Scaled(-1))

    ranks(2, body)


@pytest.mark.backends("gloo", "shm")
def test_a_share_of_a_gradient_that_comes_later_is_refused(ranks: Ranks) -> None:
    """Before the update of the next step that is compared."""

    def body() -> None:
        trainable = laid_out(Scaled(5))
        for _ in range(7):
            trainable.step(ROWS, ROWS)
        with raises_by_now(LayoutError, match="the gradient of scale is that of rank 0 on ranks"):
            trainable.step(ROWS, ROWS)

    ranks(2, body)


@pytest.mark.backends("gloo", "shm")
def test_a_rank_that_leaves_out_a_batch_is_stopped(ranks: Ranks) -> None:
    def body() -> None:
        trainable = laid_out(Scaled(100))
        batches = [ROWS + number for number in range(9)]
        if communicator().rank == 1:
            del batches[5]
        for batch in batches[:7]:
            trainable.step(batch, batch)
        with raises_by_now(ValueError, match="expected batch 8 to be the same on ranks"):
            trainable.step(batches[7], batches[7])

    ranks(2, body)


class Counting(Scaled):
    """Gives other outputs in each pass of its training, by what no tensor counts."""

    def __init__(self) -> None:
        super().__init__(100)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        assert not self.training or len(x) > 1
        return super().forward(x) * (self.passes if self.training else 1)


class Normed(Scaled):
    """Computes on batches of more than one sample only while it trains."""

    def __init__(self) -> None:
        super().__init__(100)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def test_what_cannot_be_compared_while_it_trains_is_compared_in_evaluation(ranks: Ranks) -> None:
    def body() -> None:
        noisy = laid_out(Noisy())
        assert noisy.module.training
        laid_out(Counting())
        laid_out(Counting(), rows=1)
        laid_out(Normed(), rows=1).step(ROWS, ROWS)

    ranks(2, body)
