from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn

from support.internals.recipes import MetricsFile, RunProgress, live_display


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"step": 1, "loss": 5.5})
        assert json.loads(path.read_text()) == {"step": 1, "loss": 5.5}


def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    with closing(MetricsFile(path, step=3)) as metrics:
        metrics.write({"step": 4})
    assert steps_in(path) == [1, 2, 3, 4]


def test_a_full_file_says_so_once_and_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path, limit=40)) as metrics:
        problems = [metrics.write({"step": step}) for step in range(1, 6)]
    assert steps_in(path) == [1, 2, 3]
    assert problems[3] == f"{path} has reached its limit of 40 bytes and ends"
    assert problems[:3] + problems[4:] == [""] * 4


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"step": 1})
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_plain_lines_come_every_so_often_and_at_the_end() -> None:
    lines: list[str] = []
    progress = RunProgress(lines.append, steps=5, every=2)
    for step in range(1, 6):
        progress.step(step, loss=1 / step, speed=12345.6, left=3661.0)
    progress.note("saved")
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/5",
        "step 4/5",
        "step 5/5",
        "saved",
    ]
    assert lines[0] == "step 2/5  loss 0.5000  12,346 tokens/s  1:01:01 left"


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert live_display() is None


def test_a_terminal_shows_one_line_that_is_redrawn() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    display = Progress(TextColumn("{task.completed}: {task.fields[detail]}"), console=console)
    progress = RunProgress(print, steps=2, every=1, done=1, display=display)
    assert display.tasks[0].completed == 1  # a run that was resumed
    progress.step(1, loss=2.5, speed=1000.0, left=61.0)
    progress.note("saved [here]")
    progress.step(2, loss=2.0, speed=1000.0, left=0.0)
    progress.close()
    assert "saved [here]" in screen.getvalue()
    assert "2: loss 2.0000  1,000 tokens/s  0:00 left" in screen.getvalue()
