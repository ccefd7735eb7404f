"""Gradient reductions and gathers of shards inside graphs of `torch.compile`.

Bottom-up:

    bucket_pass  plans buckets of marked gradients, fuses their reductions, and checks the graph
    unit_pass    places gathers of shards, and checks the graph
    marking      the pass, its settings and ways to compile, loaded by the first traced replica
    breaks       graph breaks, with reasons
"""

from __future__ import annotations

from meshwright.compiler.breaks import GraphBreak, GraphBreaks
from meshwright.compiler.marking import MARKING, aot_backend, compile_module, compiled_autograd

counters = MARKING.counters
"""Counts of compiled reductions in this process so far, see `MARKING`."""

__all__ = [
    "MARKING",
    "GraphBreak",
    "GraphBreaks",
    "aot_backend",
    "compile_module",
    "compiled_autograd",
    "counters",
]
