"""Traces: every event there, none hidden, and the round trip through the file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.report import read_chrome_trace, write_chrome_trace
from support.internals.report import trace_events
from support.internals.timeline import LANES, Event, Timeline

Record = dict[str, object]


def timed(lane: str, rank: int, start: int, length: int, name: str) -> Event:
    """Whole microseconds after an arbitrary beginning, as seconds."""
    return Event(
        name=name,
        lane=lane,
        rank=rank,
        start=1000.5 + start / 1e6,
        end=1000.5 + (start + length) / 1e6,
        bytes=length,
        category="work",
        axis="shard" if length % 2 else "",
        label=name * 2,
        sequence=start if start % 2 else None,
    )


timelines = st.lists(
    st.builds(
        timed,
        st.sampled_from(LANES),
        st.integers(0, 2),
        st.integers(0, 20),
        st.integers(0, 10),
        st.text(max_size=3),
    ),
    max_size=25,
).map(Timeline)


@settings(max_examples=60, deadline=None)
@given(timelines)
def test_no_event_hides_or_crosses_another(timeline: Timeline) -> None:
    records = [record for record in trace_events(timeline) if record["ph"] == "X"]
    assert len(records) == len(timeline.events)
    names = {
        (r["pid"], r["tid"]): r["args"]["name"]  # pyrefly: ignore
        for r in trace_events(timeline)
        if r["name"] == "thread_name"
    }
    spans: dict[object, list[tuple[int, int]]] = {}
    for record in records:
        start, length = round(1000 * record["ts"]), round(1000 * record["dur"])  # pyrefly: ignore
        spans.setdefault((record["pid"], record["tid"]), []).append((start, start + length))
    for thread, row in spans.items():
        for (a, b), (c, d) in itertools.combinations(sorted(row, key=lambda s: (s[0], -s[1])), 2):
            nested = names[thread].startswith("compute") and c >= a and d <= b  # pyrefly: ignore
            assert b <= c or nested, (names[thread], (a, b), (c, d))


@settings(max_examples=40, deadline=None)
@given(timeline=timelines)
def test_round_trip_through_the_file(
    timeline: Timeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    write_chrome_trace(timeline, path)
    back = read_chrome_trace(path)
    assert len(back.events) == len(timeline.events)

    def key(event: Event) -> tuple[object, ...]:
        return (
            event.rank,
            event.lane,
            round((event.start - 1000) * 1e8),
            round((event.end - 1000) * 1e8),
            event.name,
            event.bytes,
            event.category,
            event.axis,
            event.label,
            str(event.sequence),
        )

    assert sorted(map(key, back.events)) == sorted(map(key, timeline.events))


def test_what_a_viewer_needs(tmp_path: Path) -> None:
    timeline = Timeline(
        [
            timed("compute", 1, 0, 100, "step"),
            timed("compute", 1, 10, 20, "forward"),
            timed("reduce", 1, 50, 30, "bucket 0"),
            timed("reduce", 1, 60, 10, "bucket 1"),
            timed("gather", 0, 5, 1, "unshard 0"),
        ]
    )
    write_chrome_trace(timeline, tmp_path / "timeline.json")
    document = json.loads((tmp_path / "timeline.json").read_text())
    records: list[dict] = document["traceEvents"]
    processes = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = {
        (r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"
    }
    order = [
        threads[r["pid"], r["tid"]]
        for r in sorted(records, key=lambda r: r["args"].get("sort_index", -1))
        if r["name"] == "thread_sort_index" and r["pid"] == 1
    ]
    assert order == ["compute", "gather", "reduce", "reduce 2", "transfer"]
    rows = {r["name"]: threads[r["pid"], r["tid"]] for r in records if r["ph"] == "X"}
    assert rows == {
        "step": "compute",
        "forward": "compute",
        "bucket 0": "reduce",
        "bucket 1": "reduce 2",
        "unshard 0": "gather",
    }
    bucket = next(r for r in records if r["name"] == "bucket 0")
    assert (bucket["ts"], bucket["dur"], bucket["cat"]) == (50, 30, "work")
    assert bucket["args"] == {"bytes": 30, "label": "bucket 0bucket 0"}
    assert list(tmp_path.iterdir()) == [tmp_path / "timeline.json"]


def test_an_empty_timeline_is_a_trace(tmp_path: Path) -> None:
    write_chrome_trace(Timeline(), tmp_path / "empty.json")
    assert read_chrome_trace(tmp_path / "empty.json") == Timeline()


def test_a_failed_write_leaves_the_earlier_trace(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_chrome_trace(Timeline(), path)
    with pytest.raises(FileNotFoundError):
        write_chrome_trace(Timeline(), tmp_path / "missing" / "timeline.json")
    occupied = tmp_path / "occupied"
    (occupied / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="occupied"):
        write_chrome_trace(Timeline(), occupied)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["occupied", "timeline.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"writer": "x"}}', "\xff"])
def test_other_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"Chrome trace written by Meshwright in .*other\.json"):
        read_chrome_trace(path)
