"""Tensor parallelism: weights and activations of one layer sharded over the ranks of an axis.

Parameters are DTensors at rest; forward and backward run on local tensors and communicate only
where a style says so.

Bottom-up:

    functions       differentiable communication
    checks          checks that ranks run the same passes on equal values
    layouts         conversion between layouts
    layers          modules that compute on shards
    styles          styles: parameters that become DTensors, and conversions of layouts
    own_parameters  modules that compute with parameters of their own, such as experts
    apply           `parallelize_module`
    loss            cross entropy of logits that are sharded by classes, and `loss_parallel`
"""

from __future__ import annotations

from meshwright.tensor_parallel.apply import parallelize_module
from meshwright.tensor_parallel.checks.equality import verify_replicated
from meshwright.tensor_parallel.loss import cross_entropy_of_parts, loss_parallel
from meshwright.tensor_parallel.styles import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
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
