"""Simulated time: lanes, costs of communication, memory, size."""

from __future__ import annotations

import pytest

from meshwright.schedule import Action, Schedule
from support.internals.schedule import BUILDERS, Costs, build, lower, simulate


def test_lanes_of_two_ranks() -> None:
    costs = Costs(forward=2, input=2, weight=1, transfer=1, gather=3, reduce=4)
    found = simulate(lower(build("gpipe", 2, 1)), costs)
    spans = {(e.rank, e.name): (e.lane, e.start, e.end) for e in found.timeline.events}
    assert spans == {
        (0, "0UNSHARD"): ("gather", 0, 3),
        (0, "0F0"): ("compute", 3, 5),
        (0, "0SEND_F0"): ("transfer", 5, 6),
        (0, "0B0"): ("compute", 12, 15),
        (0, "0REDUCE_GRAD"): ("reduce", 15, 19),
        (1, "1UNSHARD"): ("gather", 0, 3),
        (1, "1F0"): ("compute", 6, 8),
        (1, "1B0"): ("compute", 8, 11),
        (1, "1SEND_B0"): ("transfer", 11, 12),
        (1, "1REDUCE_GRAD"): ("reduce", 11, 15),
    }
    assert found.makespan == 19
    assert found.compute == (5, 5)
    assert found.bubbles == (14, 14)


def test_transfers_run_beside_compute() -> None:
    # Each message takes as long as a forward: the pipeline still keeps its pace.
    costs = Costs(forward=1, input=1, weight=1, transfer=1)
    slow = simulate(lower(build("gpipe", 2, 8)), costs, events=False).makespan
    free = simulate(lower(build("gpipe", 2, 8)), events=False).makespan
    assert slow == free + 2


@pytest.mark.parametrize("name", BUILDERS)
def test_every_lowered_schedule_is_simulated(name: str) -> None:
    found = simulate(lower(build(name, 2, 4)))
    names = {event.name for event in found.timeline.events}
    assert {"0UNSHARD", "0REDUCE_GRAD"} <= names
    assert found.bubble_fraction == pytest.approx(sum(found.bubbles) / found.makespan / 2)


def test_costs_by_stage_and_memory() -> None:
    costs = Costs(forward=[1.0, 3.0], activation=[10.0, 1.0], parameters=[100.0, 50.0])
    found = simulate(lower(build("1f1b", 2, 4)), costs, events=False)
    assert found.compute == (12, 20)
    assert found.peaks == (120, 51)


def test_an_overlap_gives_its_first_result_at_once() -> None:
    rows = [["(0F0;1F0)OVERLAP_F_B", "0B0", "1B0"]]
    schedule = Schedule.of("one", [[Action.parse(t) for t in row] for row in rows], [0, 0], 1)
    with pytest.raises(AssertionError, match="never ends"):
        simulate(schedule)


def test_many_ranks_and_microbatches() -> None:
    found = simulate(build("1f1b", 64, 512), events=False)
    assert found.makespan == (512 + 63) * 3
