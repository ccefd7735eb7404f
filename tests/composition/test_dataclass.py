"""`parallelize` over axis tensor compares what a model returns in a dataclass, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.composition import parallelize
from meshwright.plan import Plan, TensorPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes


@dataclass
class Output:
    logits: Any
    more: Any = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(None, [Output(self.down(self.up(x).relu()))])


def loss(output: Output, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.more[0].logits, target)


def body() -> None:
    torch.manual_seed(0)
    x, model = torch.ones(2, 4, dtype=torch.float64), Model().double()
    expected = loss(model(x), x).detach()
    plan = Plan(
        axes=Axes.of({"tensor": 2}),
        tensor=TensorPlan(rules={"up": "colwise", "down": "rowwise"}),
    )
    trainable = parallelize(
        model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, example=(x,)
    )
    torch.testing.assert_close(trainable.step(x, x).loss, expected)
    assert type(trainable.eval(x, x).output) is Output


def test_outputs_in_dataclasses(ranks: Ranks) -> None:
    ranks(2, body)
