"""What to recompute, against every choice there is."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright import PlanError
from meshwright.planner import trace_model
from support.internals.planner import (
    RecomputeOption,
    choose,
    load_hardware,
    peak_of,
    recompute_options,
)
from support.internals.recipes import LanguageModel, ModelConfig

pytest.importorskip("scipy")
GAP = 0.01
Units = list[list[RecomputeOption]]


def drawn(seed: int) -> tuple[Units, dict[int, int]]:
    """Up to 12 layers of uneven sizes; each keeps what it makes, and reads what the last made."""
    draw = random.Random(seed)
    count = draw.choice((3, 6, 9, 12))
    ways = 3 if count < 9 else 2
    sizes = {key: draw.randint(1, 1000) << 20 for key in range(4 * count + 1)}
    units: Units = []
    for layer in range(count):
        entering, *made = (4 * layer + k for k in range(5))
        whole = frozenset((entering, *made))
        all_of = sum(sizes[key] for key in made)
        options = [
            RecomputeOption(modules=(), seconds=0.0, kept=whole, again=0),
            RecomputeOption(
                modules=(f"layers.{layer}",),
                seconds=draw.uniform(1, 10),
                kept=frozenset((entering,)),
                again=all_of,
            ),
            RecomputeOption(
                modules=(f"layers.{layer}.attention",),
                seconds=draw.uniform(0.3, 4),
                kept=whole - {made[1], made[2]},
                again=sizes[made[1]] + sizes[made[2]],
            ),
        ]
        units.append(options[:ways])
    return units, sizes


def best_of_all(units: Units, sizes: dict[int, int], budget: float) -> float | None:
    fitting = (
        sum(option.seconds for option in options)
        for options in itertools.product(*units)
        if peak_of(options, sizes) <= budget
    )
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_its_gap_of_the_best_of_all(seed: int) -> None:
    units, sizes = drawn(seed)
    whole = peak_of([options[0] for options in units], sizes)
    least = peak_of([options[1] for options in units], sizes)
    budget = least + random.Random(seed).uniform(0.1, 0.9) * (whole - least)
    best = best_of_all(units, sizes, budget)
    assert best is not None
    found = choose(units, sizes, budget, gap=GAP)
    assert found.peak <= budget
    assert found.gap <= GAP
    assert best <= found.seconds <= best / (1 - GAP) + 1e-9


def test_what_two_units_keep_counts_once() -> None:
    both = frozenset({0})
    units = [
        [RecomputeOption(modules=(), seconds=0.0, kept=both, again=0)],
        [
            RecomputeOption(modules=(), seconds=0.0, kept=both | {1}, again=0),
            RecomputeOption(modules=("b",), seconds=1.0, kept=frozenset(), again=1),
        ],
    ]
    sizes = {0: 100, 1: 1}
    assert choose(units, sizes, 110).modules == ()
    assert peak_of([options[0] for options in units], sizes) == 101
    assert choose(units, sizes, 110).peak == 101


def test_a_budget_that_nothing_fits_is_refused() -> None:
    units, sizes = drawn(1)
    with pytest.raises(PlanError, match="do not fit"):
        choose(units, sizes, 1000)


def test_without_a_choice_in_time_whole_layers_are_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units, sizes = drawn(1)
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: SimpleNamespace(x=None))
    found = choose(units, sizes, 1e12)
    assert found.modules == tuple(f"layers.{layer}" for layer in range(len(units)))
    assert (found.gap, found.peak) == (1.0, peak_of([options[1] for options in units], sizes))


def model() -> nn.Module:
    return LanguageModel(ModelConfig(layers=4, dim=64, heads=2))


def test_a_model_keeps_what_its_policy_says() -> None:
    trace = trace_model(model, torch.zeros(4, 64, dtype=torch.long))
    units = recompute_options(trace, load_hardware("h100"))
    whole, least = trace.saved(), trace.saved(["layers.*"])
    budget = (whole + least) / 2
    found = choose(units, trace.sizes, budget)
    assert len(found.modules) > 0
    assert trace.saved(found.modules) <= found.peak <= budget
    assert 0 < found.share < 1
    assert choose(units, trace.sizes, 2 * whole).modules == ()
