"""Names inside of `meshwright.layout`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.layout": (
            "ALIGNMENT, Box, ChunkedLayout, Cut, FlatLayout, Partial, Placement, Replicate, "
            "Shard, boxes, chunk"
        ),
    }
)
