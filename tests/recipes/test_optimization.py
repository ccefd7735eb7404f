from __future__ import annotations

import math

import pytest
from torch import nn

from support.internals.recipes import OptimizerConfig, adamw, learning_rate, set_learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, warmup_steps=4)


def test_warm_up_then_cosine() -> None:
    rates = [learning_rate(CONFIG, step, 24) for step in range(1, 25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert math.isclose(rates[13], 0.55)
    assert math.isclose(rates[-1], 0.1)


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_a_run_shorter_than_its_warm_up(steps: int) -> None:
    assert math.isclose(
        max(learning_rate(CONFIG, step, steps) for step in range(1, steps + 1)), 1.0
    )


def test_no_warm_up() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(config, 1, 10) < 1.0


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = adamw(OptimizerConfig(weight_decay=0.3))(module.parameters())
    decay = {
        parameter.ndim: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decay == {2: 0.3, 1: 0.0}
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_model_without_vectors() -> None:
    optimizer = adamw(OptimizerConfig())(nn.Linear(3, 4, bias=False).parameters())
    assert len(optimizer.param_groups) == 1
