"""The page as a browser shows it: its pixels have the colours of the legend."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

from meshwright.report import write_page
from support.report import layouts, rows

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

Pixel = tuple[int, int, int]


def screenshot(page: Path, *, width: int, height: int) -> Counter[Pixel]:
    """Count the pixels of ``page`` by colour."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no browser: {', '.join(BROWSERS)}")
    picture = page.with_suffix(".png")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
    subprocess.run(
        [
            *(found, *quiet, f"--user-data-dir={page.parent / 'profile'}"),
            *(f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return Counter(pixels(picture.read_bytes()))


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


@pytest.mark.slow
def test_a_browser_shows_colours_and_labels(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(layouts(), page, title="A run", metrics=rows(20))
    seen = screenshot(page, width=1000, height=1300)
    for name, colour in {
        "forward": (0x3B, 0x76, 0xC4),
        "backward": (0x3D, 0x9A, 0x50),
        "gather parameters": (0x8E, 0x6B, 0xBF),
        "reduce gradients": (0xC2, 0x47, 0x5B),
        "axis tensor": (0xD4, 0xA0, 0x17),
    }.items():
        assert seen[colour] > 100, name
    assert seen[0x20, 0x21, 0x24] > 500, "the letters of headings, tables and labels"
    assert seen[255, 255, 255] > sum(seen.values()) / 2
