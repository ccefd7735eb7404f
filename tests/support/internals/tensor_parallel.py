"""Names inside of `meshwright.tensor_parallel`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.tensor_parallel": "functions, layers",
        "meshwright.tensor_parallel.checks.equality": "look_at_bits",
        "meshwright.tensor_parallel.checks.passes": "Passes",
        "meshwright.tensor_parallel.functions": (
            "Labels, copy_to, exchange, gather_from, reduce_from, reduce_scatter_to, scatter_to"
        ),
    }
)
