"""Timelines of runs shown to readers, as files that viewers open.

Bottom-up:

    chrome_trace  a `Timeline` as a Chrome trace, and back
    page          an HTML file of what was measured and simulated, drawn as SVG
"""

from __future__ import annotations

from meshwright.report.chrome_trace import read_chrome_trace, write_chrome_trace
from meshwright.report.page import draw_timeline, write_page

__all__ = ["draw_timeline", "read_chrome_trace", "write_chrome_trace", "write_page"]
