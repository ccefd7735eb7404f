"""Tensor parallelism: one layer's weights and activations over the ranks of an axis.

Parameters are DTensors at rest; forward and backward run on local tensors and communicate only
where a style says so. Bottom-up: `functions` (communication that autograd understands), `layouts`
(from one layout to another), `weights` (parameters that become DTensors), `linear`, `embedding`,
`sequence` (the modules that compute), `styles`, `apply` (`parallelize_module`).
"""

from __future__ import annotations

from meshwright.tensor_parallel.apply import parallelize_module
from meshwright.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from meshwright.tensor_parallel.weights import verify_replicated

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
    "verify_replicated",
]
