"""Operations of a step, counted by hand, and the shares of a peak that they make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from meshwright.planner import trace_model
from support.internals.planner import StepWork, work_of
from support.internals.recipes import LanguageModel, ModelConfig, open_task
from support.recipes.runs import read_run

# Layers, dim, hidden, context, vocabulary of the dense decoders below.
L, D, H, S, V = 2, 16, 64, 32, 256
MATRICES = 4 * D * D + 2 * D * H
OF_LAYER = S * (2 * MATRICES + 4 * S * D)
"""Operations of a layer's forward of one window, by hand."""


def model(**options: object) -> LanguageModel:
    return LanguageModel(ModelConfig(layers=L, heads=2, dim=D, context=S, **options))


def counted(*, tied: bool = False) -> Mapping[str, float]:
    example = torch.zeros(3, S, dtype=torch.long)
    return trace_model(lambda: model(tied=tied), example).flops


@pytest.mark.parametrize("tied", [False, True])
def test_mfu_and_hfu_are_those_of_a_hand_count(tied: bool) -> None:
    forward = 3 * (L * OF_LAYER + S * 2 * D * V)
    whole = work_of(counted(tied=tied))
    assert (whole.forward, whole.again, whole.model) == (forward, 0, 3 * forward)
    again = work_of(counted(tied=tied), ["layers.0", "layers.1", "layers.1.attention"])
    assert (again.forward, again.again) == (forward, 3 * L * OF_LAYER)
    # Half a second on two ranks of 10^9 operations a second.
    assert again.mfu(0.5, 2e9) == pytest.approx(3 * forward / 1e9)
    assert again.hfu(0.5, 2e9) == pytest.approx((3 * forward + 3 * L * OF_LAYER) / 1e9)


def test_a_part_of_a_layer_that_recomputes_counts_alone() -> None:
    found = work_of(counted(), ["layers.0.feed_forward", "layers.1.feed_forward.w1"])
    assert found.again == 3 * S * (2 * 2 * D * H + 2 * D * H)


def test_experts_count_for_the_tokens_that_they_get(tmp_path: Path) -> None:
    given = ["model.experts=8", "model.top_k=2", "axes.replicate=2"]
    plain, again = (
        open_task(read_run(tmp_path, *given, f"train.recompute={names}")).work()
        for names in ([], ["layers.1"])
    )
    tokens, width = 8 * 16, 16  # of a step of the tiny run, two layers
    layer = 2 * (4 * width**2 + 2 * 2 * width * 4 * width) + 4 * 16 * width
    assert plain.forward == tokens * (2 * layer + 2 * 256 * width)
    assert (plain.again, again.again) == (0, tokens * layer)


def test_a_longer_step_uses_less() -> None:
    work = StepWork(100.0, 50.0).times(2)
    assert (work.mfu(2.0, 1000.0), work.hfu(2.0, 1000.0)) == (0.3, 0.35)
