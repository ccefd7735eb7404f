"""The page as a browser shows it: its pixels, where its texts stand, and what its script does."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.report import Run, write_runs
from support.report import layouts, rows

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

Pixel = tuple[int, int, int]


def browse(page: Path, *options: str) -> bytes:
    """What a browser prints of ``page``."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no browser: {', '.join(BROWSERS)}")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
    alone = ("--disable-background-networking", f"--user-data-dir={page.parent / 'profile'}")
    command = [found, *quiet, *alone, *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout


def screenshot(page: Path, *, width: int, height: int, dark: bool) -> Counter[Pixel]:
    """Count the pixels of ``page`` by color."""
    picture = page.with_suffix(".png")
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    browse(page, scheme, f"--window-size={width},{height}", f"--screenshot={picture}")
    return Counter(pixels(picture.read_bytes()))


def answer(page: Path, script: str, *, width: int) -> Any:
    """What ``script``, the body of a function, returns on ``page``."""
    asks = f"document.title = JSON.stringify((() => {{{script}}})())"
    asking = page.with_name("asking.html")
    asking.write_text(page.read_text().replace("</body>", f"<script>{asks}</script></body>"))
    dom = browse(asking, f"--window-size={width},1400", "--dump-dom").decode()
    return json.loads(html.unescape(re.findall(r"<title>(.*?)</title>", dom, re.DOTALL)[0]))


def pixels(png: bytes) -> list[Pixel]:
    """Read an 8-bit RGB or RGBA picture that is not interlaced (PNG specification, section 9)."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and kind in (2, 6) and png[28] == 0
    apart = 3 if kind == 2 else 4
    packed, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            packed += png[place + 8 : place + 8 + length]
        place += 12 + length
    data, line = zlib.decompress(packed), bytearray(width * apart)
    found: list[Pixel] = []
    for row in range(height):
        start = row * (width * apart + 1)
        line = _unfiltered(data[start], data[start + 1 : start + 1 + width * apart], line, apart)
        found += [(line[at], line[at + 1], line[at + 2]) for at in range(0, width * apart, apart)]
    return found


def _unfiltered(kind: int, coded: bytes, above: bytearray, apart: int) -> bytearray:
    line = bytearray(coded)
    for at in range(len(line)):
        left = line[at - apart] if at >= apart else 0
        corner = above[at - apart] if at >= apart else 0
        guess = (0, left, above[at], (left + above[at]) // 2, _nearest(left, above[at], corner))
        line[at] = (line[at] + guess[kind]) & 255
    return line


def _nearest(left: int, above: int, corner: int) -> int:
    wanted = left + above - corner
    return min((left, above, corner), key=lambda value: abs(wanted - value))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    changing = [
        {**row, "grad_norm": 1 + (step % 7) / 7} if "grad_norm" in row else row
        for step, row in enumerate(rows(60))
    ]
    path = tmp_path / "report.html"
    run = Run(
        name="a",
        metrics=changing,
        timeline=layouts(),
        facts={"layout": "shard 2 × tensor 2", "parity": "equal to one process within 1e-9"},
    )
    write_runs([run], path, title="A run")
    return path


LABELS = """
const boxes = [...document.querySelectorAll("svg")].map(svg =>
  [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]));
const overlaps = boxes.flatMap(texts => texts.flatMap(([name, a], i) => texts.slice(i + 1).filter(
  ([_, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom
).map(([other]) => [name, other])));
const heights = boxes.flat().map(([_, box]) => box.height);
return {overlaps, least: Math.min(...heights), texts: boxes.flat().map(([name]) => name),
  wide: document.documentElement.scrollWidth, window: innerWidth};
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 800, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_colors_and_labels(page: Path, width: int, dark: bool) -> None:
    seen = screenshot(page, width=width, height=2400, dark=dark)
    for name, color in {
        "forward": (0x3B, 0x76, 0xC4),
        "backward": (0x3D, 0x9A, 0x50),
        "gather parameters": (0x8E, 0x6B, 0xBF),
        "axis tensor": (0xD4, 0xA0, 0x17),
    }.items():
        assert seen[color] > 100, name
    ink, back = ((232, 234, 237), (23, 25, 28)) if dark else ((32, 33, 36), (255, 255, 255))
    assert seen[ink] > 500, "the letters of headings, tables and labels"
    assert seen[back] > sum(seen.values()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_labels_are_there_and_do_not_overlap(page: Path, width: int) -> None:
    found = answer(page, LABELS, width=width)
    assert found["overlaps"] == []
    assert {"Loss", "Learning rate", "Gradient norm", "step", "rank 0", "rank 1"} <= {
        *found["texts"]
    }
    assert found["least"] >= 8, "pixels"
    assert found["wide"] <= max(found["window"], width)


SCRIPTED = """
const curve = () => document.querySelector(".chart polyline").getAttribute("points");
const tip = document.getElementById("tip"), svg = document.querySelector(".chart svg");
const marks = () => [...svg.querySelectorAll(".marks text")].map(t => t.textContent);
const area = svg.getBoundingClientRect(), told = {before: curve(), marks: marks()};
const at = {clientX: area.right - 1, clientY: area.top + 9};
svg.dispatchEvent(new PointerEvent("pointermove", at));
told.tip = [tip.style.display, tip.textContent];
svg.dispatchEvent(new PointerEvent("pointerleave"));
told.gone = tip.style.display;
const set = (id, key, value) => {
  const input = document.getElementById(id);
  input[key] = value;
  input.dispatchEvent(new Event("input"));
  return [curve(), marks()];
};
told.log = set("log", "checked", true);
told.plain = set("log", "checked", false);
told.smooth = set("smooth", "value", 0.9);
const lanes = document.querySelector(".timeline"), box = lanes.querySelectorAll("rect")[1];
const size = () => [+box.getAttribute("x"), +box.getAttribute("width")];
const place = lanes.getBoundingClientRect();
told.whole = size();
lanes.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, ctrlKey: true, clientX: place.left + 70 *
  place.width / lanes.viewBox.baseVal.width, cancelable: true}));
told.zoomed = size();
lanes.dispatchEvent(new MouseEvent("dblclick"));
told.again = size();
return told;
"""


@pytest.mark.slow
def test_the_script_shows_values_scales_smooths_and_zooms(page: Path) -> None:
    told = answer(page, SCRIPTED, width=1400)
    assert told["tip"] == ["block", "step 60\ntraining: 0.0833333\nvalidation: 0.1"]
    assert told["gone"] == "none"
    # What the script draws unasked is what the page had without it.
    assert told["plain"] == [told["before"], told["marks"]]
    assert told["log"][0] != told["before"] and "0.1" in told["log"][1]
    assert told["smooth"][0] != told["before"]
    (x, wide), (zoomed_x, zoomed) = told["whole"], told["zoomed"]
    assert abs(zoomed_x - x) < 0.01 and abs(zoomed / wide - 1.25) < 0.01
    assert told["again"] == told["whole"]
