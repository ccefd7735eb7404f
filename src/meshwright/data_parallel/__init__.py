"""Training the same parameters on different batches.

Bottom-up: `starting_state` (what ranks must hold alike), `buckets` (gradients in one buffer, fixed
by parameter index), `reducer` (hooks and order of the reductions), `replica` (a module that is kept
equal), `replicated` (the composable function `replicate`), `batch_norm` (statistics of all ranks).
"""

from __future__ import annotations

from meshwright.data_parallel.batch_norm import batch_norms, synchronise_batch_norm
from meshwright.data_parallel.reducer import ReductionSettings
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.replicated import ReplicateOptions, replicate

__all__ = [
    "ReductionSettings",
    "Replica",
    "ReplicateOptions",
    "batch_norms",
    "replicate",
    "synchronise_batch_norm",
]
