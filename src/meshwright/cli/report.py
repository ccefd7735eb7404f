"""``meshwright report``; it starts without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.errors import PlanError, ScheduleError
from meshwright.report import METRICS, read_chrome_trace, read_metrics, write_page


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Draw a run as a page for a browser: its numbers over the steps, and its last steps in time.

    A run that has not ended has no timeline yet. Of a pipeline the last step is drawn, and under it
    what its schedule should have done.
    """

    timeline: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run's folder, or a timeline.json."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """The file to write; by default report.html beside the timeline."""

    def run(self, words: list[str]) -> int:
        """Write the page."""
        given = Path(self.timeline)
        folder = given if given.is_dir() else given.parent
        output = Path(self.output) if self.output else folder / "report.html"
        trace = folder / "timeline.json" if given.is_dir() else given
        metrics = folder / METRICS
        try:
            is_there = metrics.exists() and given.is_dir()
            rows = read_metrics(metrics) if is_there else []
            timeline = None if is_there and not trace.exists() else read_chrome_trace(trace)
            write_page(timeline, output, title=f"Run {folder.resolve().name}", metrics=rows)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        print(f"wrote {output}")
        return 0
