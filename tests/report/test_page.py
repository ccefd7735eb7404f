"""The page: a picture with every action, the numbers under it, and nothing to be loaded."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

from meshwright.report import (
    draw_timeline,
    read_chrome_trace,
    read_run,
    write_chrome_trace,
    write_page,
    write_runs,
    write_simulation,
)
from support.internals.schedule import Costs, lower, simulate, zbv
from support.internals.timeline import LANES, Event, Timeline
from support.report import layouts, rows

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
    assert not re.search(r"(src|href)=|@import|url\(|https?://(?!www.w3.org/2000/svg)", text)
    assert text.count("<svg") == 2
    assert "<h1>zbv &lt;2&gt;</h1>" in text
    assert re.search(r"Measured: [0-9.]+ s, [0-9.]+% of it idle", text)
    assert re.search(r"Simulated: [0-9.]+ s, [0-9.]+% of it idle", text)
    write_page(Timeline([Event(name="forward", lane="compute", rank=0, start=0.0, end=1.0)]), file)
    assert file.read_text(encoding="utf-8").count("<svg") == 1


def test_a_simulation_says_its_idle_share_and_what_ranks_hold(tmp_path: Path) -> None:
    file, found = tmp_path / "simulated.html", simulate(lower(zbv(2, 4)), Costs(transfer=0.25))
    write_simulation(
        found.timeline,
        file,
        title="zbv, simulated",
        idle=found.bubble_fraction,
        held=found.peaks,
    )
    text = file.read_text(encoding="utf-8")
    assert text.count("<svg") == 1 and "Measured" not in text
    assert f"Simulated: {found.bubble_fraction:.1%} of the ranks' time idle" in text
    assert f"<td>rank 1</td><td>{found.compute[1]:g}</td><td>{found.peaks[1]:g}</td>" in text


def test_checks_are_no_gathers(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(layouts(), file)
    cells = re.findall(r"<tr><td>rank 0</td>(.*?)</tr>", file.read_text(encoding="utf-8"))[0]
    lanes = [*LANES, "checks", "exposed"]
    told = dict(zip(lanes, re.findall(r"<td>([^<]*)</td>", cells), strict=True))
    assert told["gather"] == "500 ms" and told["reduce"] == "1.5 s" and told["checks"] == "500 ms"


def test_what_was_predicted_is_beside_what_was_measured(tmp_path: Path) -> None:
    lanes = {"compute": (0.5, 1.0), "transfer": (0.0, 0.0)}
    (tmp_path / "metrics.jsonl").write_text("")
    told = {"time": lanes, "memory": {"activations": (2.0**21, 2.0**20)}}
    (tmp_path / "prediction.json").write_text(json.dumps(told))
    write_runs([read_run(tmp_path)], tmp_path / "report.html", title="Run")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for row in (
        ("lane compute", "500 ms", "1 s", "0.50"),
        ("lane transfer", "0", "0", ""),
        ("activations", "2.00 MiB", "1.00 MiB", "2.00"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in row) in page


def test_a_run_says_how_it_was_laid_out_and_how_it_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run_a"
    folder.mkdir()
    pace = {"tokens a second": "200", "MFU": "25.0%", "HFU": "25.0%", "time": "2.0 s"}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(4)))
    (folder / "config.toml").write_text("[axes]\nshard = 2\ntensor = 3\n")
    (folder / "run.json").write_text(json.dumps({"hosts": "a, b"}))
    assert not read_run(folder).is_finished
    assert read_run(folder).facts["steps"] == "4, the run has not ended"
    told = dict(list(read_run(folder).facts.items())[3:])
    assert told == {"training loss": "1.2500", "validation loss": "1.5000", **pace}
    ended = {"ranks": 6, "step": 4, "steps": 9, "loss": 1.25, "validation_loss": 1.5}
    (folder / "summary.json").write_text(json.dumps({**ended, "parity": "equal"}))
    run = read_run(folder)
    assert run.is_finished and run.timeline is None
    assert dict(run.facts) == {
        "layout": "shard 2 × tensor 3",
        "hosts": "a, b",
        "ranks": "6",
        "steps": "4 of 9",
        "training loss": "1.2500",
        "validation loss": "1.5000",
        "parity": "equal",
        **pace,
    }
    write_runs([run, replace(run, name="b", facts={"ranks": "1"})], tmp_path / "two.html", title="")
    text = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert "<tr><th></th><th>run_a</th><th>b</th></tr>" in text
    assert "<tr><td>ranks</td><td>6</td><td>1</td></tr>" in text
    assert "shard = 2" in text and 'http-equiv="refresh"' not in text
    write_runs([run], tmp_path / "live.html", title="", refresh=5)
    assert '<meta http-equiv="refresh" content="5">' in (tmp_path / "live.html").read_text()


def test_every_kind_of_event_has_a_color_that_the_legend_names(tmp_path: Path) -> None:
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
