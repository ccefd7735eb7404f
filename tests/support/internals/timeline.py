"""Names inside of `meshwright.timeline`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.timeline": (
            "Collective, Event, KINDS, Kind, LANES, LANE_OF_KIND, Lane, Timeline, union"
        ),
    }
)
