"""Names inside of `meshwright.report`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.report.chrome_trace": "trace_events",
        "meshwright.report.curves": "Chart, charts, draw_chart",
    }
)
