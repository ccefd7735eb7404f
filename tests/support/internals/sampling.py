"""Names inside of `meshwright.sampling`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.sampling": "PackedSampler, Permutation, Sampler",
    }
)
