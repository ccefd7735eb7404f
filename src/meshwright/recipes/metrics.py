"""Output of a run: a metrics file with one JSON object per step, a progress line, a timeline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from meshwright.comm import Clock, Communicator, Timer, observe
from meshwright.report import write_chrome_trace
from meshwright.report.lanes import kind_of
from meshwright.timeline import LANES, Timeline


class MetricsFile:
    """A JSONL file with one object per step, each with its ``step``.

    Opened for a run that resumes after ``step``, it first drops the lines of later steps (written
    by a run that stopped between two checkpoints) and an incomplete last line. It is closed before
    it grows beyond ``limit`` bytes.
    """

    def __init__(self, path: Path, *, step: int = 0, limit: float = math.inf) -> None:
        self.path = path
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, step) if path.exists() else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)  # at once: what interrupts this leaves all lines
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, object]) -> str:
        """Append one object; it is in the file when this returns.

        Returns the reason when it cannot be written, once; later objects are dropped silently,
        because a full disk is no reason to stop a run.
        """
        if self._file.closed:
            return ""
        try:
            line = json.dumps(dict(record), allow_nan=True) + "\n"
            if self._file.tell() + len(line) > self._limit:
                self.close()
                return f"{self.path} has reached its limit of {self._limit:,.0f} bytes and ends"
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.close()
            return f"{self.path} cannot be written: {error.strerror}; free space on its disk"
        return ""

    def close(self) -> None:
        """Close the file; further objects are dropped."""
        # Closing retries what could not be written: it is still in the buffer.
        with contextlib.suppress(OSError):
            self._file.close()


class RunProgress:
    """Shows progress: a terminal line that is redrawn after every step, or plain log lines.

    Without a ``display``, ``write`` gets a line for every ``every``-th step and for the last. The
    display starts at ``done`` steps. ``unit`` names what the speed counts.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        steps: int,
        every: int,
        done: int = 0,
        unit: str = "tokens",
        display: Progress | None = None,
    ) -> None:
        self._write = write
        self._steps = steps
        self._every = every
        self._unit = unit
        self._display = display
        if display is not None:
            self._task = display.add_task("train", total=steps, completed=done, detail="starting")
            display.start()

    def step(self, step: int, *, loss: float, speed: float, left: float, use: str = "") -> None:
        """Show that ``step`` is done, with ``left`` seconds to go; ``use`` follows the speed."""
        use = f"{use}  " if use else ""
        detail = f"loss {loss:.4f}  {speed:,.0f} {self._unit}/s  {use}{_clock(left)} left"
        if self._display is not None:
            self._display.update(self._task, completed=step, detail=detail)
        elif step % self._every == 0 or step == self._steps:
            self._write(f"step {step}/{self._steps}  {detail}")

    def note(self, text: str) -> None:
        """Write ``text`` as a line, above the one that is redrawn."""
        if self._display is None:
            self._write(text)
        else:
            self._display.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._display is not None:
            self._display.stop()


def live_display() -> Progress | None:
    """Make the live line of a terminal; None if standard output is none."""
    if not sys.stdout.isatty():
        return None
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        # Only the bar shrinks when the line is wider than the terminal.
        BarColumn(bar_width=None, table_column=Column(max_width=24)),
        TextColumn("{task.fields[detail]}"),
    )


def _lines_until(path: Path, step: int) -> list[str]:
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and line.endswith("\n") and record.get("step", 0) <= step:
            kept.append(line)
    return kept


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class StepTrace:
    """A trace that keeps the last ``keep`` steps; with 0 nothing is measured.

    The compute lane holds the spans of the trainable: forward, backward, optimizer.
    """

    def __init__(self, device: torch.device, *, keep: int) -> None:
        self._timer = Timer(Clock(device))
        self._steps: deque[Timeline] = deque(maxlen=keep)

    @contextlib.contextmanager
    def step(self, rank: int) -> Iterator[None]:
        """Measure the block as one step."""
        if not self._steps.maxlen:
            yield
            return
        with observe(self._timer):
            yield
        self._steps.append(self._timer.timeline(rank))
        self._timer.clear()

    def lanes(self, rank: int) -> dict[str, float]:
        """Return the seconds of a step in which each lane was busy, without checks and norms."""
        found = Timeline(e for step in self._steps for e in step.events if kind_of(e))
        steps = len(self._steps)
        return {lane: found.busy(rank, lane) / steps for lane in LANES} if steps else {}

    def write(self, path: Path, communicator: Communicator) -> Path | None:
        """Write the timelines of all ranks, on rank 0; ``None`` if nothing was kept.

        All ranks call it together.
        """
        mine = Timeline().merge(self._steps)
        answers = communicator.gather_bytes(mine.to_json().encode(), label="timelines")
        if not self._steps:
            return None
        if communicator.rank == 0:
            write_chrome_trace(
                Timeline().merge(Timeline.from_json(answer.decode()) for answer in answers), path
            )
        return path
