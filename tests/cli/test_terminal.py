"""What a terminal of 80 columns shows of a training."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from support.recipes.runs import CONFIG, write_text

COLUMNS, LINES = 80, 40
SOURCE = str(Path(__file__).parents[2] / "src")


def screen_of(folder: Path, *words: str) -> list[str]:
    """The lines of the screen at the end of a command in ``folder``, but for those without text."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**kept, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        while True:
            try:
                stream.feed(os.read(ours, 4096))
            except OSError:  # all who could write have ended
                break
        assert process.wait() == 0, "\n".join(screen.display)
    finally:
        process.kill()
        os.close(ours)
    return [line.rstrip() for line in screen.display if line.strip()]


@pytest.fixture
def one_core() -> Iterator[None]:
    """One core for this process and those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_a_terminal_shows_one_bar_and_each_note_once(tmp_path: Path) -> None:
    write_text(tmp_path)
    axes = "\nsave_every = 3\n[axes]\nreplicate = 2\n"
    (tmp_path / "tiny.toml").write_text(CONFIG + axes)
    given = ("--data.path=text.txt", "--run.folder=run")
    lines = screen_of(tmp_path, "-m", "meshwright", "train", "tiny.toml", *given)
    assert lines[0].startswith("2 ranks share ")
    assert lines[0].endswith("expect each step to take several times as long")
    bars = [line for line in lines if "━" in line or "╸" in line]
    assert len(bars) == 1, lines
    assert bars[0].startswith("step 6/6 ━") and bars[0].endswith("  0:00 left"), bars
    assert " tokens/s  " in bars[0], bars
    for step in (3, 6):
        saved = f"step {step}: saved run/checkpoints/step_{step:08}"
        assert [line for line in lines if f"step {step}: saved" in line] == [saved], lines


def test_a_bar_shrinks_where_the_numbers_are_large(tmp_path: Path) -> None:
    program = (
        "from meshwright.recipes.metrics import RunProgress, live_display; "
        "progress = RunProgress(print, steps=1_000_000, every=1, display=live_display()); "
        "progress.step(999_999, loss=12.3456, speed=123_456_789.0, left=3661.0); "
        "progress.close()"
    )
    (line,) = screen_of(tmp_path, "-c", program)
    numbers = "loss 12.3456  123,456,789 tokens/s  1:01:01 left"
    assert line.startswith("step  999999/1000000 ━━━") and line.endswith(f" {numbers}"), line
