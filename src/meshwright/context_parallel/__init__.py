"""Context parallelism: long sequences split over ranks, documents and all.

Bottom-up:

    split       which positions each rank holds
    masks       which keys a query sees, in words
    heads       attention by heads: all-to-all, whole sequences of some heads
    ring        attention by parts of the keys, merged by their log-sum-exp
    attention   calls of torch's and transformers' attention, caught
    own_loop    `context_parallel` and what an own loop needs beside it
    style       `ContextParallel`, for a module of attention
"""

from __future__ import annotations

from meshwright.context_parallel.own_loop import (
    context_parallel,
    context_parallel_unshard,
    global_mean,
    positions,
    set_rotate_method,
    split_of,
)
from meshwright.context_parallel.style import ContextParallel

__all__ = [
    "ContextParallel",
    "context_parallel",
    "context_parallel_unshard",
    "global_mean",
    "positions",
    "set_rotate_method",
    "split_of",
]
