"""Names inside of `meshwright.losses`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.losses.chunked": "chunked_heads, head_of",
        "meshwright.losses.linear": "LossOptions, Vocabulary, sum_and_count",
    }
)
