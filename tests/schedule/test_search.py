"""The schedule for given costs: never slower than a built one, within its memory, and legal."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from meshwright.errors import ScheduleError
from meshwright.schedule import Action, Costs, Operation, Schedule, find_schedule
from support.internals.schedule import (
    BUILDERS,
    arrange,
    build,
    built_schedules,
    check,
    check_lowered,
    lower,
    simulate,
)
from support.schedule import refilled


class Case(NamedTuple):
    """Costs, drawn by number."""

    ranks: int
    microbatches: int
    chunks: int
    costs: Costs
    limits: list[float] | None


def drawn(seed: int, *, uneven: bool) -> Case:
    """Two to four ranks; more than half of the cases have limits of memory around that of 1F1B."""
    dice = random.Random(seed)
    ranks, chunks = dice.choice((2, 3, 4)), dice.choice((1, 2))
    microbatches = dice.choice((ranks, 2 * ranks, 2 * ranks))

    def each(least: float, most: float) -> Any:
        if not uneven:
            return dice.uniform(least, most)
        return [dice.uniform(least, most) for _ in range(ranks * chunks)]

    activation = [dice.uniform(0.5, 1.5) if uneven else 1.0 for _ in range(ranks * chunks)]
    costs = Costs(
        forward=each(0.5, 2.0),
        input=each(0.5, 2.0),
        weight=each(0.3, 1.5),
        transfer=dice.choice((0.0, 0.1, 0.3)),
        activation=activation,
    )
    limits = None
    if dice.random() < 0.6:
        mean = ranks * sum(activation) / ranks
        limits = [mean * dice.uniform(0.8, 1.6) for _ in range(ranks)]
    return Case(ranks, microbatches, chunks, costs, limits)


def best_built(case: Case) -> float:
    """The shortest step of the built schedules that fit; infinite if none does."""
    best = math.inf
    for schedule in built_schedules(case.ranks, case.microbatches, case.chunks):
        found = simulate(lower(schedule), case.costs, events=False)
        limits = case.limits or [math.inf] * case.ranks
        if all(p <= n * (1 + 1e-9) for p, n in zip(found.peaks, limits, strict=True)):
            best = min(best, found.makespan)
    return best


def gain(case: Case) -> float:
    """The share of the best built step that the found schedule saves, which is checked."""
    schedule = find_schedule(
        case.ranks, case.microbatches, case.costs, chunks=case.chunks, limits=case.limits
    )
    check(schedule, ranks=case.ranks)
    lowered = lower(schedule)
    check_lowered(lowered)
    found = simulate(lowered, case.costs, events=False)
    for peak, limit in zip(found.peaks, case.limits or (), strict=case.limits is not None):
        assert peak <= limit * (1 + 1e-9)
    built = best_built(case)
    return 0.0 if built == math.inf else 1 - found.makespan / built


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_never_slower_than_the_best_built_one_and_often_faster(count: int) -> None:
    uneven = [gain(drawn(seed, uneven=True)) for seed in range(count // 2)]
    even = [gain(drawn(seed, uneven=False)) for seed in range(count // 2)]
    assert min((*uneven, *even)) >= 0.0
    better = sum(share >= 0.03 for share in uneven)
    print(f"{better} of {len(uneven)} uneven cost sets gain 3 % or more")
    assert better >= len(uneven) / 4


def test_all_ten_are_what_it_is_compared_with() -> None:
    names = {schedule.name for schedule in built_schedules(4, 8, 2)}
    assert names == set(BUILDERS)
    for schedule in built_schedules(2, 4, 2):
        check(schedule, ranks=2)
        check_lowered(lower(schedule))
    one = [s for s in built_schedules(2, 4, 2) if s.name == "1f1b"]
    assert [s.stage_ranks for s in one] == [(0, 0, 1, 1)]
    assert " ".join(map(str, one[0].actions(1))).startswith("2F0 3F0 3B0 2B0 2F1 3F1")
    # Two stages of half the cost each are one stage.
    halves = simulate(lower(one[0]), Costs.shared(2), events=False)
    assert halves.makespan == simulate(build("1f1b", 2, 4), events=False).makespan


def test_the_same_arguments_give_the_same_schedule() -> None:
    case = drawn(5, uneven=True)
    found = [
        find_schedule(case.ranks, case.microbatches, case.costs, chunks=case.chunks, limits=limits)
        for limits in (case.limits, case.limits, None)
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_weight_halves_fill_the_gaps_of_given_costs() -> None:
    # The second stage is slow: the first waits for its gradients, and has time for its W.
    costs = Costs(forward=[1.0, 3.0], input=[1.0, 3.0], weight=[1.0, 1.0])
    schedule = refilled(build("1f1b", 2, 4), costs)
    assert schedule is not None
    row = " ".join(map(str, schedule.actions(0)))
    assert row == "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3"
    assert simulate(schedule, costs).makespan < simulate(build("1f1b", 2, 4), costs).makespan


def test_a_forward_waits_until_its_activations_fit() -> None:
    schedule = refilled(build("gpipe", 1, 3), Costs(), limits=[2.0])
    assert schedule is None  # all forwards come first
    like = build("zb1p", 1, 3)
    every = [[Action(0, o, k) for k in range(3)] for o in (Operation.F, Operation.I)]
    found = arrange([every], like, Costs(), [2.0])
    assert found is not None
    assert " ".join(map(str, found[0].rows[0])) == "0F0 0F1 0I0 0I1 0W0 0F2 0I2 0W1 0W2"
    freed = arrange([every], like, Costs(deferred=0.5), [2.0])
    assert freed is not None
    assert " ".join(map(str, freed[0].rows[0])) == "0F0 0F1 0I0 0I1 0F2 0I2 0W0 0W1 0W2"


def test_what_waits_for_weight_halves_counts_as_what_is_left_of_it() -> None:
    schedule = Schedule.of(
        "one", [[Action.parse(t) for t in ("0F0", "0I0", "0F1", "0I1", "0W0", "0W1")]], [0], 2
    )
    assert simulate(schedule, Costs()).peaks == (2.0,)
    assert simulate(schedule, Costs(deferred=0.25)).peaks == (1.25,)
    assert simulate(build("gpipe", 1, 2), Costs(deferred=0.25)).peaks == (2.0,)
    assert simulate(build("zb1p", 1, 2), Costs(deferred=0.25)).peaks == (1.0,)


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zb2p"])
def test_the_list_scheduler_keeps_the_time_of_the_simulator(name: str) -> None:
    costs = Costs(forward=[1.0, 1.5, 2.0, 0.5], input=1.25, weight=0.75, transfer=0.25)
    like = refilled(build(name, 4, 8), costs)
    assert like is not None
    orders = [[[a for a in row if a and a.operation is not Operation.W]] for row in like.rows]
    found = arrange(orders, like, costs)
    assert found is not None
    assert found[0].rows == like.rows
    step = simulate(lower(like), costs)
    assert found[1] == pytest.approx(step.makespan)


def test_a_built_schedule_that_nothing_beats_is_kept() -> None:
    assert find_schedule(2, 4, Costs()).name == "zb1p"
    assert find_schedule(4, 8, Costs.shared(2), chunks=2, limits=[2.0] * 4).name == "vmin"


def test_less_memory_than_any_built_one_needs() -> None:
    ample = find_schedule(4, 8, Costs(), limits=[1.0] * 4)
    assert simulate(lower(ample), events=False).peaks == (1.0,) * 4
    with pytest.raises(ScheduleError, match=r"rank 2: one microbatch at a time needs 2 of memory"):
        find_schedule(4, 8, Costs(activation=[1.0, 1.0, 2.0, 1.0]), limits=[1.0] * 4)


@pytest.mark.parametrize(
    ("change", "limits", "text"),
    [
        ({"forward": [1.0, 1.0]}, None, "forward: expected 4 stages, found 2"),
        ({"weight": math.nan}, None, r"weight\[0\]: expected a size of 0 to 1e100, found nan"),
        (
            {"input": [1.0, 1.0, -1.0, 1.0]},
            None,
            r"input\[2\]: expected a size of 0 to 1e100, found",
        ),
        ({"forward": 1e308}, None, r"forward\[0\]: expected a size of 0 to 1e100, found 1e\+308"),
        ({"deferred": -1.0}, None, r"deferred\[0\]: expected a size of 0 to 1e100, found -1.0"),
        ({}, [1.0], "limits: expected 2 ranks, found 1"),
        ({}, [1.0, math.nan], r"limits\[1\]: expected a size of 0"),
    ],
)
def test_costs_that_do_not_fit(
    change: dict[str, Any], limits: list[float] | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        find_schedule(2, 4, replace(Costs(), **change), chunks=2, limits=limits)
