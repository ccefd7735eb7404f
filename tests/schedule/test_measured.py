"""A measured timeline: its schedule, its costs, its bubble; events of a simulation stand for it."""

from __future__ import annotations

import pytest

from support.internals.schedule import (
    Costs,
    bubble,
    build,
    compare,
    costs_of,
    last_step,
    lower,
    schedule_of,
    simulate,
)
from support.internals.timeline import Event, Timeline

PLANS = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "zb1p", "zb2p", "zbv", "vhalf", "vmin")


def ran(name: str, transfer: float = 0.25, begin: float = 0.0, ranks: int = 2) -> Timeline:
    """A step as if it had been measured, on the ranks 3, 4, ..."""
    schedule = build(name, ranks, 4, None)
    costs = Costs(forward=1.0, input=2.0, weight=1.5, transfer=transfer, reduce=0.5)
    events = simulate(lower(schedule), costs).timeline.events
    return Timeline(
        Event(
            name=event.name,
            lane=event.lane,
            rank=3 + event.rank,
            start=begin + event.start,
            end=begin + event.end,
            category=event.category,
        )
        for event in events
    )


@pytest.mark.parametrize("name", PLANS)
def test_order_costs_and_bubble_are_read_off(name: str) -> None:
    schedule, timeline = build(name, 2, 4, None), ran(name)
    found = schedule_of(timeline)
    assert found is not None
    # Parts of an overlap run one after the other, so their rows hold them one by one.
    assert [list(found.actions(rank)) for rank in range(2)] == [
        list(schedule.actions(rank)) for rank in range(2)
    ]
    assert found.stage_ranks == schedule.stage_ranks
    costs = costs_of(timeline, found)
    assert costs.forward == [1.0] * found.stages
    both = zip(costs.input, costs.weight, strict=True)  # pyrefly: ignore[bad-argument-type]
    assert [sum(pair) for pair in both] == [3.5] * found.stages
    comparison = compare(timeline)
    assert comparison is not None
    whole = simulate(lower(schedule), Costs(forward=1.0, input=2.0, weight=1.5, transfer=0.25))
    assert comparison.bubble == pytest.approx(whole.bubble_fraction)
    chunks = found.stages // 2
    assert comparison.peaks == tuple(peak / chunks for peak in whole.peaks)
    assert comparison.simulated_bubble == pytest.approx(comparison.bubble)
    assert comparison.simulated.ranks == (3, 4)


def test_a_transfer_costs_what_it_takes_when_its_receiver_waits() -> None:
    def event(name: str, lane: str, rank: int, start: float, end: float, category: str) -> Event:
        return Event(name=name, lane=lane, rank=rank, start=start, end=end, category=category)

    timeline = Timeline(
        [
            event("0F0", "compute", 0, 0, 1, "F"),
            event("0F1", "compute", 0, 1, 2, "F"),
            event("0SEND_F0", "transfer", 0, 1, 9, "send"),
            event("0SEND_F1", "transfer", 0, 2, 9, "send"),
            event("1RECV_F0", "transfer", 1, 0, 1.25, "recv"),
            event("1RECV_F1", "transfer", 1, 0, 5, "recv"),
            event("1F0", "compute", 1, 1.25, 5, "F"),
            event("1F1", "compute", 1, 5, 6, "F"),
        ]
    )
    schedule = schedule_of(timeline)
    assert schedule is not None
    assert costs_of(timeline, schedule).transfer == [0.25, 0.0]
    assert bubble(timeline) == pytest.approx(1 - (2 + 4.75) / 12)


def test_of_several_steps_the_last_is_taken() -> None:
    first, second = ran("1f1b"), ran("1f1b", begin=100.0)
    assert last_step(first.merge([second])) == second
    assert last_step(first) == first


def test_other_timelines_have_no_schedule() -> None:
    events = [Event(name="forward", lane="compute", rank=0, start=0.0, end=1.0)]
    assert compare(Timeline(events)) is None
    assert compare(Timeline()) is None
    assert bubble(Timeline(events)) == 0.0
