"""Gradient reductions inside of graphs that `torch.compile` makes.

Bottom-up: `bucket_plan` (which marks go together), `bucket_pass` (marks become fused reductions),
`guarantees` (checked after the pass), `marking` (the pass and its settings, loaded by
the first replica that is traced), `entries` (how to compile), `breaks`
(where graphs end).
"""

from __future__ import annotations

from meshwright.compiler.breaks import GraphBreak, GraphBreaks
from meshwright.compiler.entries import aot_backend, compile_module, compiled_autograd
from meshwright.compiler.marking import MARKING

counters = MARKING.counters
"""What the compiled reductions of this process have done so far."""

__all__ = [
    "MARKING",
    "GraphBreak",
    "GraphBreaks",
    "aot_backend",
    "compile_module",
    "compiled_autograd",
    "counters",
]
