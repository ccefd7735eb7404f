"""Reports of runs: HTML pages and Chrome traces.

Bottom-up:

    chrome_trace  a `Timeline` as a Chrome trace, and back
    svg           texts and round numbers of drawings
    lanes         a `Timeline` drawn as SVG
    curves        the metrics of a run, read and drawn as SVG
    run           a run's folder, read
    page          an HTML file of all of these, with the simulation next to the measurement
"""

from __future__ import annotations

from meshwright.report.chrome_trace import read_chrome_trace, write_chrome_trace
from meshwright.report.curves import METRICS, read_metrics
from meshwright.report.lanes import draw_timeline
from meshwright.report.page import write_page, write_runs, write_simulation
from meshwright.report.run import PREDICTION, Run, read_run

__all__ = [
    "METRICS",
    "PREDICTION",
    "Run",
    "draw_timeline",
    "read_chrome_trace",
    "read_metrics",
    "read_run",
    "write_chrome_trace",
    "write_page",
    "write_runs",
    "write_simulation",
]
