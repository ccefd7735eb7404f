"""Names inside of `meshwright.expert_parallel`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.expert_parallel": "balance, exchange, forms, layer, routing, style",
    }
)
