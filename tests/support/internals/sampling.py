"""Names inside of `meshwright.sampling`."""

from __future__ import annotations

from support.internals import lookup

__getattr__ = lookup(
    {
        "meshwright.sampling": "PackedSampler, Permutation, Sampler",
    }
)
