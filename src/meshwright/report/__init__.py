"""Runs shown to readers: timelines as files that viewers open, and two runs compared.

Bottom-up:

    chrome_trace  a `Timeline` as a Chrome trace, and back
    drawing       a `Timeline` as an SVG picture
    tensor_rows   what a run wrote of its tensors
    compare       the first tensor in which two runs differ
    page          an HTML file of what was measured and simulated
"""

from __future__ import annotations

from meshwright.report.chrome_trace import read_chrome_trace, write_chrome_trace
from meshwright.report.compare import Finding, RunComparison, compare_runs
from meshwright.report.drawing import draw_timeline
from meshwright.report.page import write_page
from meshwright.report.tensor_rows import SKETCH, Header, Sums, TensorRow, trace_file

__all__ = [
    "SKETCH",
    "Finding",
    "Header",
    "RunComparison",
    "Sums",
    "TensorRow",
    "compare_runs",
    "draw_timeline",
    "read_chrome_trace",
    "trace_file",
    "write_chrome_trace",
    "write_page",
]
