"""Names inside of `meshwright.layout`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.layout": (
            "ALIGNMENT, Box, ChunkedLayout, Cut, FlatLayout, Partial, Placement, Replicate, "
            "Shard, boxes, chunk"
        ),
    }
)
