"""Pairs of settings that are refused when a model is built, each with its reason.

Those between columns of the matrix stand in `REFUSALS`; the others are here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from matrix.refusals import REFUSALS, refusal_of
from matrix.training import check
from meshwright.composition import check_model, parallelize
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import MODELS, Ranks
from support.internals.axes import Axes
from support.internals.precision import Precision


def plan_of(precision: Precision | None = None, axis: str = "replicate", **train: Any) -> Plan:
    return Plan(
        axes=Axes.of({axis: 2}),
        precision=precision or Precision(),
        pipeline=PipelinePlan(microbatches=2) if axis == "pipeline" else PipelinePlan(),
        train=TrainPlan(**train),
    )


SETTINGS: dict[str, tuple[str, Plan]] = {
    "the model has BatchNorm": ("batch_norm", plan_of()),
    "has no effect: the model has no BatchNorm": ("sequential", plan_of(batch_norm="sync")),
    "no module of the model is a dropout": ("sequential", plan_of(dropout="global")),
    "per_rank has no effect with dropout": ("dropout", plan_of(per_rank=("1",))),
    "only bfloat16 and float16 can differ": (
        "sequential",
        plan_of(Precision(compute="float64")),
    ),
    "needs a second copy of the parameters": (
        "sequential",
        plan_of(Precision(optimizer="float64")),
    ),
    "axis tensor = 2 has nothing to cut": ("sequential", plan_of(axis="tensor")),
    "would drop other activations on each rank of axis tensor": (
        "dropout",
        replace(plan_of(axis="tensor"), tensor=TensorPlan(rules={"0": "colwise", "2": "rowwise"})),
    ),
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_that_do_not_go_together(text: str) -> None:
    name, plan = SETTINGS[text]
    with pytest.raises(PlanError) as found:
        check_model(MODELS[name].build(), plan, 2)
    assert [text in problem for problem in found.value.problems] == [True]


class Round(nn.Module):
    """``inner`` has another way around it, so that no chain is left."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = inner
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y + self.inner(y))


def body_traced() -> None:
    for inner, train, text in (
        (nn.Dropout(0.5), {"dropout": "global"}, "graphs, which do not ask in which step"),
        (nn.BatchNorm1d(6), {"batch_norm": "sync"}, "a graph has each rank's own statistics"),
    ):
        plan = plan_of(axis="pipeline", **train)
        options: dict[str, Any] = {"optimizer": None, "example": (torch.ones(4, 6),)}
        with pytest.raises(PlanError, match=text):
            parallelize(Round(inner), plan, loss=F.mse_loss, **options)


@pytest.mark.slow
def test_what_traced_stages_cannot_do(ranks: Ranks) -> None:
    ranks(2, body_traced)


def test_every_refusal_has_an_example() -> None:
    assert [refusal_of(refusal.example) for refusal in REFUSALS] == [*REFUSALS]


@pytest.mark.slow
def test_what_is_refused(ranks: Ranks) -> None:
    check(ranks, [refusal.example for refusal in REFUSALS], 120)
