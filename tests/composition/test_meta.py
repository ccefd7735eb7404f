"""`parallelize` of a model on the meta device: the values of one seed, the same on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.composition import parallelize
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.randomness import initialize
from meshwright.testing import Ranks
from support.internals.axes import Axes
from support.internals.precision import Precision

SEED = 7


class Buffered(nn.LayerNorm):
    """With a buffer that no state dict has."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "scale" in self._buffers:
            self.scale.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def build() -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(9, 6),
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Linear(8, 6),
        Buffered(6),
        nn.Linear(6, 9, bias=False),
    )
    model[5].weight = model[0].weight
    return model


RULES = {"0": "embedding", "1": "colwise", "3": "rowwise", "5": "colwise_gathered"}


def plan_of(axes: dict[str, int], parameters: str | None) -> Plan:
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules=RULES) if "tensor" in axes else TensorPlan(),
        pipeline=PipelinePlan(microbatches=2 if "pipeline" in axes else 1),
        precision=Precision() if parameters is None else Precision(parameters=parameters),
        train=TrainPlan(seed=SEED),
    )


def body(cases: list[tuple[dict[str, int], str | None]]) -> None:
    ids = torch.randint(0, 9, (8,), generator=torch.Generator().manual_seed(0))
    for axes, parameters in cases:
        torch.manual_seed(torch.initial_seed() + 1)  # what a program has drawn does not matter
        with torch.device("meta"):
            model = build()
        before = torch.get_rng_state()
        options: dict[str, Any] = {"optimizer": torch.optim.Adam, "loss": F.cross_entropy}
        trainable = parallelize(model, plan_of(axes, parameters), example=(ids[:4],), **options)
        assert torch.equal(before, torch.get_rng_state())
        expected = initialize(build(), SEED)
        if parameters is not None:
            expected = expected.to(getattr(torch, parameters))
        weights = trainable.weights()
        assert list(weights) == list(expected.state_dict())
        for name, tensor in expected.state_dict().items():
            assert torch.equal(weights[name], tensor), (axes, name)
        share = ids.chunk(trainable.data_size)[trainable.data_rank]
        loss = trainable.step(share, share).loss
        wanted = F.cross_entropy(expected(ids), ids).double()
        tolerance = 1e-6 if parameters is None else 2e-2
        torch.testing.assert_close(loss, wanted.detach(), rtol=tolerance, atol=tolerance)


def test_a_model_on_the_meta_device_gets_the_values_of_the_seed(ranks: Ranks) -> None:
    cases = [({axis: 2}, None) for axis in ("replicate", "shard", "tensor", "pipeline")]
    ranks(2, body, [*cases, ({"shard": 2}, "bfloat16")])


@pytest.mark.slow
def test_a_model_on_the_meta_device_gets_the_same_values_on_pairs_of_axes(ranks: Ranks) -> None:
    pairs = ("replicate", "shard"), ("shard", "tensor"), ("pipeline", "tensor")
    ranks(4, body, [(dict.fromkeys(sorted(pair), 2), None) for pair in pairs])
