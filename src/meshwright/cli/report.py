"""``meshwright report``; it starts without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.errors import PlanError, ScheduleError
from meshwright.report import read_run, write_runs


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Draw a run as a page for a browser.

    The page has the facts of the run, curves of its metrics, and a timeline of its last steps.
    Several runs share one page. A run that has not ended has no timeline yet. For a pipeline, the
    page draws the last step, and below it the simulation of its schedule.
    """

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders of runs, or timeline.json files."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = ""
    """The file to write; by default report.html in the folder of the first run."""
    watch: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Seconds between redraws of the page until the runs have ended; 0 draws it once."""

    def run(self, words: list[str]) -> int:
        if not self.runs:
            raise PlanError("expected the folder of a run, found none")
        if self.watch < 0:
            raise PlanError(f"--watch: expected seconds of at least 0, found {self.watch:g}")
        first = Path(self.runs[0])
        folder = first if first.is_dir() else first.parent
        output = Path(self.output) if self.output else folder / "report.html"
        while not self._write(output):
            time.sleep(self.watch)
        return 0

    def _write(self, output: Path) -> bool:
        """Write the page; returns False if it must be written again."""
        try:
            runs = [read_run(run) for run in self.runs]
            if len({run.name for run in runs}) < len(runs):
                runs = [replace(run, name=path) for run, path in zip(runs, self.runs, strict=True)]
            is_last = not self.watch or all(run.is_finished for run in runs)
            title = f"Run{'s' if len(runs) > 1 else ''} {', '.join(run.name for run in runs)}"
            write_runs(runs, output, title=title, refresh=None if is_last else self.watch)
        except (ValueError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        print(f"wrote {output}", flush=True)
        return is_last
