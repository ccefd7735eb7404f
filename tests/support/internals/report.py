"""Names inside of `meshwright.report`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.report.chrome_trace": "trace_events",
        "meshwright.report.curves": "Chart, charts, draw_chart",
    }
)
