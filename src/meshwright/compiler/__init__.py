"""Gradient reductions, and gathers of shards, inside of graphs that `torch.compile` makes.

Bottom-up:

    bucket_plan  the marks that go together
    bucket_pass  marks that become fused reductions, and checks of the graph after it
    unit_pass    gathers of shards in their places, and checks of the graph after it
    marking      the pass, its settings and ways to compile, loaded by the first traced replica
    breaks       the ends of graphs, with reasons
"""

from __future__ import annotations

from meshwright.compiler.breaks import GraphBreak, GraphBreaks
from meshwright.compiler.marking import MARKING, aot_backend, compile_module, compiled_autograd

counters = MARKING.counters
"""Counts of what the compiled reductions of this process have done so far."""

__all__ = [
    "MARKING",
    "GraphBreak",
    "GraphBreaks",
    "aot_backend",
    "compile_module",
    "compiled_autograd",
    "counters",
]
