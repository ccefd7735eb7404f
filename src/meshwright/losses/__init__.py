"""Losses in chunks: cross entropy without all logits at once.

Bottom-up:

    linear      `linear_cross_entropy` of hidden states and the weight of a head
    chunked     `in_chunks`: models whose head computes it in place of logits
"""

from __future__ import annotations

from meshwright.losses.chunked import cross_entropy, in_chunks
from meshwright.losses.linear import linear_cross_entropy

__all__ = ["cross_entropy", "in_chunks", "linear_cross_entropy"]
