"""Tensor parallelism: one layer's weights and activations over the ranks of an axis.

Parameters are DTensors at rest; forward and backward run on local tensors and communicate only
where a style says so. Bottom-up: `functions` (communication that autograd understands), `following`
(layouts from style to style), `layouts` (from one layout to another), `weights` (parameters that
become DTensors), `equality` (what each rank holds whole is equal), `linear`, `transposed`,
`embedding` and `sequence` (the modules that compute), `styles` and `prepare`, `optimizers` (what
they hold), `passes` (whether ranks do the same, with the same values), `apply`
(`parallelize_module`), `loss` and `loss_context` (cross entropy of logits that are cut by classes).
"""

from __future__ import annotations

from meshwright.tensor_parallel.apply import parallelize_module
from meshwright.tensor_parallel.equality import verify_replicated
from meshwright.tensor_parallel.loss import cross_entropy_of_parts
from meshwright.tensor_parallel.loss_context import loss_parallel
from meshwright.tensor_parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from meshwright.tensor_parallel.styles import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "FusedColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "cross_entropy_of_parts",
    "loss_parallel",
    "parallelize_module",
    "verify_replicated",
]
