"""Timelines of runs shown to readers, as files that viewers open.

Bottom-up:

    chrome_trace  a `Timeline` as a Chrome trace, and back
    drawing       a `Timeline` as an SVG picture
    page          an HTML file of what was measured and simulated
"""

from __future__ import annotations

from meshwright.report.chrome_trace import read_chrome_trace, write_chrome_trace
from meshwright.report.drawing import draw_timeline
from meshwright.report.page import write_page

__all__ = ["draw_timeline", "read_chrome_trace", "write_chrome_trace", "write_page"]
