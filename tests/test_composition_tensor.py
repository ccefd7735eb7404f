"""`parallelize` with axis tensor: parity with one process, alone and with other axes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.axes import Axes
from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.composition.checks import check_model
from meshwright.errors import PlanError
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.recipes.config import ModelConfig
from meshwright.recipes.language_model import LanguageModel
from meshwright.testing import MODELS, Ranks, Sample, assert_same_training

RULES = {
    "transformer": {
        "embedding": "embedding",
        "layers.*.widen": "colwise",
        "layers.*.narrow": "rowwise",
        "head": "colwise_gathered",
    },
    "tied": {"embedding": "embedding", "hidden": "colwise_gathered", "head": "colwise_gathered"},
    "frozen": {"0": "colwise", "2": "rowwise", "4": "colwise_gathered"},
    "uneven": {"0": "colwise", "2": "rowwise", "3": "rowwise_scattered"},
    "reused": {"layer": "colwise_gathered", "head": "rowwise_scattered"},
}
CLIPPED = TrainPlan(clip_norm=0.05, accumulate=2)


def plan_of(
    rules: Any, train: TrainPlan | None = None, schedule: PipelinePlan | None = None, **axes: int
) -> Plan:
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules=rules),
        train=train or TrainPlan(),
        pipeline=schedule or PipelinePlan(),
    )


def language_model(**options: Any) -> Sample:
    config = ModelConfig(dim=16, heads=4, layers=2, **options)
    like = MODELS["transformer"]
    return Sample(
        name="language model",
        build=lambda: LanguageModel(config),
        inputs=like.inputs,
        targets=like.targets,
        loss=like.loss,
    )


@pytest.mark.parametrize("name", RULES)
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    assert_same_training(
        MODELS[name], plan_of(RULES[name], CLIPPED, tensor=2), world=2, ranks=ranks
    )


@pytest.mark.parametrize("other", ["replicate", "shard"])
def test_trains_as_one_process_beside_data_axes(ranks: Ranks, other: str) -> None:
    plan = plan_of("language-model", CLIPPED, **{other: 2, "tensor": 2})
    assert_same_training(language_model(tied=True), plan, world=4, ranks=ranks)


def test_trains_as_one_process_in_a_pipeline(ranks: Ranks) -> None:
    schedule = PipelinePlan(schedule="1f1b", microbatches=2)
    plan = plan_of("language-model", CLIPPED, schedule, pipeline=2, tensor=2)
    assert_same_training(language_model(tied=True), plan, world=4, batch_size=16, ranks=ranks)


class Gated(nn.Module):
    """A scale between two layers that are cut: its gradient is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(2)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).unflatten(-1, (-1, 2))
        return self.down(self.norm(hidden).flatten(-2))


class Mixed(nn.Module):
    """Three matrices side by side in one layer: a part of it is not a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 12)
        self.down = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.mixed(x).chunk(3, dim=-1)
        return self.down(first * second + third)


def body_check() -> None:
    example = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)

    def lay_out(rules: dict[str, str], kind: type[nn.Module] = Gated) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"optimizer": None, "loss": F.mse_loss, "example": example}
        parallelize(kind(), plan_of(rules, tensor=2), **options)

    both = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(PlanError, match=r"gradient of 'norm\.weight' .* differs .*\"replicated\""):
        lay_out(both)
    lay_out({**both, "norm": "replicated"})
    with pytest.raises(PlanError, match=r"cannot run then: down .* found shape \(4, 8\)"):
        lay_out({"up": "colwise_gathered", "norm": "replicated", "down": "rowwise"})
    with pytest.raises(PlanError, match="as a whole .* Give the last module a style that gathers"):
        lay_out({"up": "colwise_gathered", "down": "colwise"})
    with pytest.raises(PlanError, match="an output of shape .* differs from the whole"):
        lay_out({"mixed": "colwise", "down": "rowwise"}, Mixed)
    with pytest.raises(PlanError, match=r"axis tensor is checked against the whole model: give"):
        parallelize(Gated(), plan_of(both, tensor=2), optimizer=None, loss=F.mse_loss)
    rank = communicator().rank
    trainable = parallelize(
        Gated(),
        plan_of({**both, "norm": "replicated"}, tensor=2),
        optimizer=torch.optim.Adam,
        loss=F.mse_loss,
        example=example,
    )
    assert (trainable.data_rank, trainable.data_size) == (0, 1)
    with pytest.raises(ValueError, match=r"ranks \[1\] were given another batch than rank 0"):
        trainable.step(torch.full((4, 6), float(rank)), torch.zeros(4, 3))
    text = str(trainable.describe())
    assert "up.weight" in text
    assert "tensor(2)" in text


def test_a_cut_that_changes_the_model_is_refused(ranks: Ranks) -> None:
    ranks(2, body_check)


def problems_of(model: nn.Module, plan: Plan) -> str:
    with pytest.raises(PlanError) as found:
        check_model(model, plan, plan.axes.world_size)
    return str(found.value)


def test_rules_that_do_not_fit_are_named() -> None:
    model = LanguageModel(ModelConfig(dim=12, heads=3, layers=1))
    assert "heads = 3, which is no multiple of 2" in problems_of(
        model, plan_of("language-model", tensor=2)
    )
    assert "did you mean 'llama'?" in problems_of(model, plan_of("llamma", tensor=2))
    assert "match no module of _Tied" in problems_of(
        MODELS["tied"].build(), plan_of("llama", tensor=2)
    )
    wrong = problems_of(model, plan_of({"head": "columnwise", "tail": "rowwise"}, tensor=2))
    assert "unknown style 'columnwise'" in wrong
    assert "'tail' in [tensor] rules matches no module" in wrong


def body_ties() -> None:
    words = torch.arange(4).view(2, 2)
    sample = MODELS["tied"]
    with pytest.raises(PlanError, match=r"rules: .*tied parameter.*placed"):
        parallelize(
            sample.build(),
            plan_of({"embedding": "embedding", "head": "rowwise_scattered"}, tensor=2),
            optimizer=None,
            loss=sample.loss,
            example=(words,),
        )


def test_a_tied_table_is_not_cut_two_ways(ranks: Ranks) -> None:
    ranks(2, body_ties)
