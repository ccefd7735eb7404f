"""`parallelize` with dropout whose masks are those of one process, on every kind of layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks
from support.internals.axes import Axes

RULES = {"0": "colwise", "2": "replicated", "3": "rowwise"}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(8, 6),
        nn.Dropout(0.25),
        nn.Linear(6, 3),
    ).double()


def plan_of(accumulate: int = 1, microbatches: int = 1, rules: Any = None, **axes: int) -> Plan:
    rules = RULES if rules is None and axes.get("tensor", 1) > 1 else rules
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules=rules),
        pipeline=PipelinePlan(microbatches=microbatches),
        train=TrainPlan(dropout="global", accumulate=accumulate, clip_norm=1.0),
    )


def losses_of(plan: Plan, group: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).double()
    y = torch.randn(16, 3, generator=torch.Generator().manual_seed(2)).double()
    trainable = parallelize(
        build(), plan, optimizer=torch.optim.Adam, loss=F.mse_loss, example=(x[:4],), group=group
    )
    rows = 16 // trainable.data_size
    mine = slice(trainable.data_rank * rows, (trainable.data_rank + 1) * rows)
    losses = [float(trainable.step(x[mine], y[mine]).loss) for _ in range(3)]
    return losses, trainable.weights()


LAYOUTS = [
    {"accumulate": 2, "replicate": 2, "tensor": 2},
    {"shard": 2, "replicate": 2},
    {"microbatches": 2, "accumulate": 2, "pipeline": 2, "shard": 2},
    {"microbatches": 4, "pipeline": 2, "tensor": 2},
]


def body_layouts() -> None:
    world = communicator()
    alone = torch.distributed.new_group([world.rank], use_local_synchronization=True)
    expected, weights = losses_of(plan_of(), alone)
    assert len(set(expected)) == 3
    for layout in LAYOUTS:
        found, mine = losses_of(plan_of(**layout))
        assert found == pytest.approx(expected, rel=1e-9), layout
        for name, weight in weights.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-9, atol=1e-11)
    # The mask between layers that are cut is a part of a mask, and whoever leaves that out is told.
    with pytest.raises(PlanError, match="differs from the whole"):
        losses_of(plan_of(rules={"0": "colwise", "3": "rowwise"}, replicate=2, tensor=2))


def test_masks_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(4, body_layouts)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.drop(self.layer(x)), 0.5, self.training)


def body_refusals() -> None:
    x = torch.ones(4, 4)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "loss": F.mse_loss}
    with pytest.raises(RuntimeError, match=r"ran aten\.bernoulli.*depend on the layout"):
        parallelize(Functional(), plan_of(replicate=2), **options).step(x, x)
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2, dropout=0.5), "b": nn.Dropout(0.5)})
    with pytest.raises(PlanError, match=r"\"global\": .*a \(MultiheadAttention with dropout=0\.5"):
        parallelize(attention, plan_of(replicate=2), **options)
    with pytest.raises(PlanError, match=r"dropout = \"global\" has no effect"):
        parallelize(nn.Linear(4, 4), plan_of(replicate=2), **options)


def test_other_random_operators_are_refused_by_name(ranks: Ranks) -> None:
    ranks(2, body_refusals)
