"""Training the same parameters on different batches.

Bottom-up:

    modules                 user modules: their tensors, their inputs, and their names
    distributed_parameters  parameters that are DTensors on axes of tensor parallelism
    checks                  checks that the ranks of one model do the same
    replicas                equal copies: `replicate` and `DistributedDataParallel`
    comm_hooks              communication hooks, which replace the plain sum of a bucket
    shards                  sharded parameters: their memory, their units, and how users see them
    sharded_modules         `fully_shard`: the hooks that gather, free and reduce units
    flat_parameters         the flat view of a model, for optimizers
    owned_matrices          whole matrices, each on one rank, for optimizers: `own_matrices`
    residency               replicated and sharded modules as a pipeline's schedule drives them
"""

from __future__ import annotations

from meshwright.data_parallel.flat_parameters import flat_groups
from meshwright.data_parallel.modules.batch_norm import (
    batch_norms,
    keep_batch_norm_local,
    synchronise_batch_norm,
    synchronize_batch_norm,
)
from meshwright.data_parallel.owned_matrices import own_matrices
from meshwright.data_parallel.replicas.distributed import DistributedDataParallel
from meshwright.data_parallel.replicas.gradient_bucket import GradBucket
from meshwright.data_parallel.replicas.low_precision import MixedPrecision
from meshwright.data_parallel.replicas.options import (
    ReductionSettings,
    ReplicateOptions,
)
from meshwright.data_parallel.replicas.replica import Replica
from meshwright.data_parallel.replicas.replicated import ReplicatedModule, replicate
from meshwright.data_parallel.sharded_modules.sharded import (
    fully_shard,
    register_fsdp_forward_method,
)
from meshwright.data_parallel.sharded_modules.sharded_module import (
    FSDPModule,
    UnshardHandle,
    share_comm_ctx,
)
from meshwright.data_parallel.shards.placement import ShardPlacementResult
from meshwright.data_parallel.shards.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DistributedDataParallel",
    "FSDPModule",
    "GradBucket",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReductionSettings",
    "Replica",
    "ReplicateOptions",
    "ReplicatedModule",
    "ShardPlacementResult",
    "UnshardHandle",
    "batch_norms",
    "flat_groups",
    "fully_shard",
    "keep_batch_norm_local",
    "own_matrices",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "synchronise_batch_norm",
    "synchronize_batch_norm",
]
