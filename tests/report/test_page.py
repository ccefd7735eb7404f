"""The page: a picture with every action, the numbers under it, and nothing to be loaded."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from meshwright.report import (
    draw_timeline,
    read_chrome_trace,
    write_chrome_trace,
    write_page,
    write_simulation,
)
from meshwright.schedule.builders import zbv
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate
from meshwright.timeline import Event, Timeline
from support.report import layouts

SVG = "{http://www.w3.org/2000/svg}"


def step() -> Timeline:
    return simulate(lower(zbv(2, 4)), Costs(transfer=0.25)).timeline


def titles(svg: str) -> list[str]:
    return [title.text or "" for title in ET.fromstring(svg).iter(f"{SVG}title")]


def width(svg: str, name: str) -> float:
    for box in ET.fromstring(svg).iter(f"{SVG}rect"):
        if any((title.text or "").startswith(f"{name}:") for title in box):
            return float(box.attrib["width"])
    raise AssertionError(f"{name} is not drawn")


def test_every_event_is_drawn_once_and_to_scale() -> None:
    timeline = step()
    svg = draw_timeline(timeline)
    assert sorted(text.split(":")[0] for text in titles(svg)) == sorted(
        event.name for event in timeline.events
    )
    forward, send = width(svg, "0F0"), width(svg, "0SEND_F0")
    assert abs(forward / send - 4.0) < 0.01
    half = draw_timeline(timeline, span=2 * timeline.end)
    assert abs(width(half, "0F0") - forward / 2) < 0.01


def test_names_are_escaped_and_received_messages_left_out() -> None:
    events = [
        Event(name="<b>&", lane="compute", rank=0, start=0.0, end=1.0),
        Event(name="1RECV_F0", lane="transfer", rank=0, start=0.0, end=1.0, category="recv"),
    ]
    assert titles(draw_timeline(Timeline(events))) == ["<b>&: 1 s, at 0"]
    assert titles(draw_timeline(Timeline())) == []


def test_a_page_stands_alone_and_compares(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(step(), file, title="zbv <2>")
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|@import|url\(", text)
    assert text.count("<svg") == 2
    assert "<h1>zbv &lt;2&gt;</h1>" in text
    assert re.search(r"Measured: [0-9.]+ s, [0-9.]+% of it idle", text)
    assert re.search(r"Simulated: [0-9.]+ s, [0-9.]+% of it idle", text)
    write_page(Timeline([Event(name="forward", lane="compute", rank=0, start=0.0, end=1.0)]), file)
    assert file.read_text(encoding="utf-8").count("<svg") == 1


def test_a_simulation_is_drawn_once_and_called_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "simulated.html"
    write_simulation(step(), file, title="zbv, simulated")
    text = file.read_text(encoding="utf-8")
    assert text.count("<svg") == 1 and "Measured" not in text


def test_every_kind_of_event_has_a_colour_that_the_legend_names(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(layouts(), file)
    text = file.read_text(encoding="utf-8")
    named = dict(re.findall(r'<i style="background:(#\w+)"></i>([^<]*)</span>', text))
    drawn = set(re.findall(r'fill="(#[0-9a-f]{6})"', text))
    assert drawn == set(named)
    assert set(named.values()) == {
        *("forward", "backward", "optimizer", "other compute", "gather parameters"),
        *("reduce gradients", "axis tensor", "checks, norms, losses"),
    }


def test_a_trace_shows_the_simulation_beside_and_reads_back_without(tmp_path: Path) -> None:
    file, timeline = tmp_path / "timeline.json", step()
    write_chrome_trace(timeline, file, simulated=timeline)
    assert read_chrome_trace(file) == timeline
    records = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    names = [r["args"]["name"] for r in records if r["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 0, simulated", "rank 1, simulated"]
    assert sum(record["ph"] == "X" for record in records) == 2 * len(timeline.events)
