"""Training the same parameters on different batches.

Bottom-up: `options` (what users ask for), `starting_state` (what ranks must hold alike), `slots`
(which gradients go together), `buckets` (gradients in one buffer), `kept_memory` and `in_place` (a
large one alone), `sparse_gradient` (rows of one), `gradient_bucket` (what a hook sees),
`static_graph` (the same parameters each time), `step_watch` and `alignment` (the same steps and
passes on every rank), `pass_notes` (what ranks tell each other of a pass), `distributed_parameters`
(DTensors of tensor parallelism), `reducer` (hooks and order of the reductions), `module_tensors`
and `equal_buffers` (what a module holds now), `nested` (what it is given and returns),
`low_precision` (computing in another dtype), `batch_norm` (whose statistics), `of_this_process`
(what no file can hold), `replica` (a module that is kept equal), `join` (uneven inputs),
`replicated` and `distributed` (the function and the class that users call), `comm_hooks`,
`power_sgd` and `local_steps` (other ways to reduce).

Sharded: `gradient_lines` (whole gradients), `kept_line` (the memory of finished ones), `buffer`
(one line of elements and its moves), `policies`, `placement` (where a parameter goes),
`partial_sums` (over axes of tensor parallelism), `parameter_hooks` (what users wait for),
`tensor_extensions` (parameters that say how they are gathered), `unit_slots`, `parameter_group` and
`unit` (parameters that come and go together), `replaced_parameters` (what users put in their
place), `order` and `iteration` (what units of one root share), `driver` (hooks),
`shard_hooks` and `sharded_join` (as for replicas), `exposed_tensors` (DTensors at rest),
`module_tree` (modules that came later), `shared_parameters`, `sharding` (from modules to a unit),
`sharded_module` and `sharded` (`fully_shard`), `residency` (what a pipeline's schedule drives),
`optimizer` (the flat view).
"""

from __future__ import annotations

from meshwright.data_parallel.batch_norm import (
    batch_norms,
    keep_batch_norm_local,
    synchronise_batch_norm,
)
from meshwright.data_parallel.distributed import DistributedDataParallel
from meshwright.data_parallel.gradient_bucket import GradBucket
from meshwright.data_parallel.low_precision import MixedPrecision
from meshwright.data_parallel.optimizer import flat_groups
from meshwright.data_parallel.options import (
    ReductionSettings,
    ReplicateKeywords,
    ReplicateOptions,
)
from meshwright.data_parallel.placement import ShardPlacementResult
from meshwright.data_parallel.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.replicated import replicate
from meshwright.data_parallel.sharded import fully_shard, register_fsdp_forward_method
from meshwright.data_parallel.sharded_module import FSDPModule, UnshardHandle, share_comm_ctx

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
    "ReplicateKeywords",
    "ReplicateOptions",
    "ShardPlacementResult",
    "UnshardHandle",
    "batch_norms",
    "flat_groups",
    "fully_shard",
    "keep_batch_norm_local",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "synchronise_batch_norm",
]
