"""Training the same parameters on different batches.

Bottom-up: `starting_state` (what ranks must hold alike), `slots` (which gradients go together),
`buckets` (gradients in one buffer), `in_place` (a large one alone), `gradient_bucket` (what a hook
sees), `reducer` (hooks and order of the reductions), `replica` (a module that is kept equal),
`join` (uneven inputs), `replicated` and `distributed` (the function and the class that users call),
`comm_hooks` (other ways to reduce), `batch_norm` (statistics of all ranks).
"""

from __future__ import annotations

from meshwright.data_parallel.batch_norm import batch_norms, synchronise_batch_norm
from meshwright.data_parallel.distributed import DistributedDataParallel
from meshwright.data_parallel.gradient_bucket import GradBucket
from meshwright.data_parallel.low_precision import MixedPrecision
from meshwright.data_parallel.reducer import ReductionSettings
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.replicated import ReplicateOptions, replicate

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "ReductionSettings",
    "Replica",
    "ReplicateOptions",
    "batch_norms",
    "replicate",
    "synchronise_batch_norm",
]
