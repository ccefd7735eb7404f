"""Names inside of `meshwright.timeline`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.timeline": (
            "Collective, Event, KINDS, Kind, LANES, LANE_OF_KIND, Lane, Timeline, union"
        ),
    }
)
