"""Curves: read from what a run has written, each value where it belongs, no peak lost."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest

from meshwright.report import read_metrics, write_page
from support.internals.report import Chart, charts, draw_chart
from support.report import rows


def test_all_numbers_of_a_run_become_curves() -> None:
    found = {chart.title: chart for chart in charts({"a": rows(4)})}
    assert list(found) == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens a second",
        "MFU and HFU, %",
        "Tensors on ranks 3-4 between steps, MiB",
        "Tensors on ranks 0-2,5 between steps, MiB",
        "Largest memory so far, MiB",
    ]
    assert found["Loss"].lines["validation"] == [(2.0, 3.0), (4.0, 1.5)]
    assert found["Tokens a second"].lines[""] == [(step, 200.0) for step in range(1, 5)]
    memory = found["Tensors on ranks 0-2,5 between steps, MiB"]
    assert [name for _, name in memory.names] == ["parameters", "optimizer"]
    assert memory.stack["optimizer"][0] == (1.0, 2000.0 / 2**20)
    peaks = found["Largest memory so far, MiB"].lines
    assert {name: line[-1] for name, line in peaks.items()} == {
        "ranks 3-4": (4.0, 2e8 / 2**20),
        "ranks 0-2,5": (4.0, 1e8 / 2**20),
    }


def test_memory_of_many_kinds_of_ranks_is_drawn_for_those_with_the_most() -> None:
    told = {str(rank): {"parameters": rank, "peak": 10 * rank} for rank in range(20)}
    before = {"step": 1, "memory": {"parameters": 7, "peak": 8}}  # as rank 0 alone wrote it once
    *kinds, peaks = charts({"a": [before, {"step": 2, "memory": told}]})
    assert [chart.title.split(" between")[0][-7:] for chart in kinds] == [
        f"rank {rank}" for rank in range(19, 12, -1)
    ]
    assert draw_chart(peaks).count("<circle") == len(kinds)


def test_the_first_step_after_a_resumption_has_no_speed_of_earlier_ones() -> None:
    found = {chart.title: chart for chart in charts({"a": rows(6)[4:]})}
    assert [step for step, _ in found["Tokens a second"].lines[""]] == [5, 6]


def test_numbers_that_are_not_there_draw_nothing() -> None:
    assert charts({"a": []}) == []
    assert [chart.title for chart in charts({"a": [{"step": 1, "loss": 2.0}]})] == ["Loss"]


@pytest.mark.parametrize("values", [[math.nan], [1.0, math.inf, 2.0], [3.0], [1.0, 1.0]])
def test_values_that_cannot_be_drawn_leave_a_gap(values: list[float]) -> None:
    svg = draw_chart(Chart("Loss", {"": list(enumerate(values))}))
    assert "nan" not in svg and "inf" not in svg
    assert svg.count("<polyline") + svg.count("<circle") == {1: 1, 2: 1, 3: 2}[len(values)] - (
        math.isnan(values[0])
    )


def test_a_long_run_keeps_its_peaks() -> None:
    line = [(float(step), 1.0) for step in range(100_000)]
    line[77_777] = (77_777.0, 9.0)
    svg = draw_chart(Chart("Loss", {"": line}))
    places = re.findall(r"([0-9.]+),([0-9.]+)", re.findall(r'points="([^"]*)"', svg)[0])
    assert len(places) < 2_000
    assert min(float(y) for _, y in places) == 26.0  # the top of the frame


def test_parts_of_a_whole_stand_on_each_other() -> None:
    stack = {"a": [(1.0, 10.0), (2.0, 10.0)], "b": [(1.0, 30.0), (2.0, 30.0)]}
    lower, upper = re.findall(
        r'points="([^"]*)"', draw_chart(Chart("Memory", {}, stack, from_zero=True))
    )
    heights = [float(place.split(",")[1]) for place in (lower.split()[0], upper.split()[0])]
    assert heights == [138.5, 26.0]  # a quarter of the frame of 150, and all of it


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(2)) + '{"step": 3, "lo')
    assert read_metrics(file) == rows(2)
    file.write_text("no json\n")
    with pytest.raises(ValueError, match=r"line 1: expected a JSON object, found .no json"):
        read_metrics(file)


def test_a_page_has_all_curves_and_says_what_mfu_is(tmp_path: Path) -> None:
    write_page(None, tmp_path / "report.html", title="Run a", metrics=rows(4))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    titles = re.findall(r'class="rank">([^<]*)<', text)
    assert titles == ["Loss", "Learning rate"]
    for constant in (
        "Gradient norm: 1 in every step.",
        "Tokens a second: 200 in every step.",
        "MFU and HFU, %: MFU 25, HFU 25 in every step.",
    ):
        assert f"<p>{constant}</p>" in text
    assert "2 operations for each parameter" in text


def test_curves_of_two_runs_are_told_apart() -> None:
    found = {chart.title: chart for chart in charts({"a": rows(4), "b": rows(6)})}
    assert [*found["Loss"].lines] == [
        *("a training", "b training"),
        *("a validation", "b validation"),
    ]
    assert [*found["Tokens a second"].lines] == ["a", "b"]
    assert not any(title.startswith("Tensors") for title in found)
    assert "a ranks 3-4" in found["Largest memory so far, MiB"].lines


def test_values_for_the_page_are_those_of_the_run() -> None:
    chart = Chart("Loss", {"training": [(1.0, 2.0), (2.0, math.nan), (3.0, 1.0)]})
    told = json.loads(html.unescape(re.findall(r'data-chart="([^"]*)"', draw_chart(chart))[0]))
    assert told["lines"][0]["points"] == [[1.0, 2.0], [3.0, 1.0]]
