"""Unions of intervals, what is exposed, and the round through JSON."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.internals.timeline import (
    KINDS,
    LANE_OF_KIND,
    LANES,
    Collective,
    Event,
    Kind,
    Lane,
    Timeline,
    union,
)

quick = settings(max_examples=60, deadline=None)
ticks = st.integers(0, 30)


def event(lane: str, start: float, end: float, rank: int = 0) -> Event:
    return Event(name=lane, lane=lane, rank=rank, start=start, end=end)


def lasting(lane: str, rank: int, start: int, length: int) -> Event:
    return event(lane, start, start + length, rank)


events = st.builds(lasting, st.sampled_from(LANES), st.integers(0, 2), ticks, st.integers(0, 8))


def seconds(timeline: Timeline, rank: int, lane: str) -> set[int]:
    """The whole seconds in which a lane runs: brute force for events with whole times."""
    chosen = [e for e in timeline.events if e.rank == rank and e.lane == lane]
    return {second for e in chosen for second in range(int(e.start), int(e.end))}


@quick
@given(st.lists(events, max_size=20))
def test_busy_and_exposed_count_each_second_once(given_events: list[Event]) -> None:
    timeline = Timeline(given_events)
    for rank in range(3):
        by_lane = {lane: seconds(timeline, rank, lane) for lane in LANES}
        assert all(timeline.busy(rank, lane) == len(by_lane[lane]) for lane in LANES)
        talking = by_lane["gather"] | by_lane["reduce"] | by_lane["transfer"]
        assert timeline.exposed(rank) == len(talking - by_lane["compute"])


def test_communication_behind_compute_is_not_exposed() -> None:
    timeline = Timeline(
        [
            event("compute", 0, 4),
            event("gather", 1, 3),
            event("reduce", 3, 6),
            event("reduce", 5, 7),
        ]
    )
    assert timeline.busy(0, "reduce") == 4
    assert timeline.exposed(0) == 3
    assert timeline.exposed(1) == 0


def test_union_joins_what_touches() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (3, 3.5)]) == [(0, 2), (3, 4)]
    assert union([]) == []


@quick
@given(
    st.lists(
        st.builds(
            Event,
            name=st.text(),
            lane=st.sampled_from(LANES),
            rank=st.integers(0, 9),
            start=st.floats(-1e9, 1e9),
            end=st.floats(1e9, 2e9),
            bytes=st.integers(0, 2**50),
            category=st.text(),
            axis=st.text(),
            label=st.text(),
            sequence=st.none() | st.integers(0),
        )
    )
)
def test_json_round_trip_is_exact(given_events: list[Event]) -> None:
    timeline = Timeline(given_events)
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "as JSON"),
        ("[]", '"format": 1'),
        ('{"format": 2, "events": []}', '"format": 1'),
        ('{"format": 1}', "list of events"),
        ('{"format": 1, "events": [3]}', "event 0 is not a record"),
        ('{"format": 1, "events": [{"nmae": ""}]}', "event 0 has unknown fields .*nmae"),
        ('{"format": 1, "events": [{"name": ""}]}', "event 0 is not complete"),
        (
            '{"format":1,"events":[{"name":"","lane":"x","rank":0,"start":0,"end":0}]}',
            "expected a lane",
        ),
        (
            '{"format":1,"events":[{"name":"","lane":"gather","rank":0,"start":"0","end":0}]}',
            "event 0 is not complete",
        ),
    ],
)
def test_other_documents_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


def test_merge_select_and_extent() -> None:
    a, b = Timeline([event("compute", 2, 3)]), Timeline([event("gather", 1, 5, rank=1)])
    both = a.merge([b])
    assert both.ranks == (0, 1)
    assert (both.start, both.end) == (1, 5)
    assert both.select(rank=1) == b
    assert both.select(lane="compute") == a
    assert both.merge([]) == both
    assert (Timeline().start, Timeline().end, Timeline().ranks) == (0, 0, ())


@pytest.mark.parametrize(
    ("start", "end"), [(1.0, 0.5), (math.nan, 1), (0, math.inf), (0, math.nan)]
)
def test_events_refuse_impossible_times(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="finite times with start <= end"):
        event("compute", start, end)


def test_every_kind_has_a_lane() -> None:
    assert set(get_args(Kind)) == set(KINDS)
    assert get_args(Lane) == LANES
    assert set(LANE_OF_KIND.values()) == set(LANES) - {"compute"}


def test_a_collective_says_what_and_why() -> None:
    gather = Collective(
        kind="all_gather",
        axis="shard",
        shape=(3, 5),
        dtype="bfloat16",
        label="unshard layers.4",
        sequence=42,
    )
    assert gather.bytes == 30
    assert str(gather) == 'all_gather #42 "unshard layers.4" on axis shard'
    drawn = Event.of(gather, rank=1, start=0.5, end=0.75)
    assert (drawn.name, drawn.lane, drawn.category) == ("unshard layers.4", "gather", "all_gather")
    assert (drawn.bytes, drawn.sequence, drawn.duration) == (30, 42, 0.25)
    assert Timeline([drawn]).bytes(1, "gather") == 30
    assert Collective(kind="barrier", axis="world").bytes == 0
    send = Collective(kind="send", axis="pipeline", peer=1, shape=(), dtype="float32")
    assert (send.bytes, send.lane) == (4, "transfer")
    assert str(send) == "send #0 on axis pipeline with peer 1"
