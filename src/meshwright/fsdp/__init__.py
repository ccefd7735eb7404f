"""`FullyShardedDataParallel`, with the API of torch's class of that name, on our engine.

`fully_shard` and related names are here as well, under the names of torch's package.

Bottom-up:

    options         strategies, precision, kinds of state dicts; accepts torch's own classes
    wrap            policies: the submodules that become units
    groups          the ranks that shard parameters, and those that replicate them
    checks          checks of a module that becomes a unit
    exposures       views of a unit's parameters for modules and optimizers
    traversal       the tree of wrappers, names, and lists of modules inside of a flat unit
    states          state dicts of models and optimizers, and whole parameters
    unit_wrapper    one wrapper as a module
    building        builds the units of a module, as a policy chooses them
    wrapper         the public class
    grad_scaler     `ShardedGradScaler`

Intended differences from torch's class:

* torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` are refused for flat parameters,
  which have several names each; use `optim_state_dict` and `optim_state_dict_to_load` there. With
  original parameters they work, and before a first step they do not change the optimizer.
* ``limit_all_gathers`` has no effect: at most two gathers are ever in flight.
* An evaluation under ``torch.no_grad`` frees parameters after each unit, in every strategy.
* Modules of tensor parallelism are wrapped with the data axes of their mesh. State dicts
  are of whole parameters.
* Hooks of `register_post_accumulate_grad_hook` on parameters run once ``.grad`` is set; hooks of
  `register_hook` are refused where they would see a part of a gradient.
* A tensor assigned to the ``.data`` of a parameter is copied into its shard and overwrites it:
  clone the old value first if you need it later.
* State dicts hold copies of parameters in units, also LOCAL ones and those of optimizers; buffers
  and ignored parameters are live in them, as in any module's.
* Ranks may ignore different modules; numbered siblings that a rank ignores are not counted when
  ranks compare names. Modules that no rank ignores must start equal.
* Optimizer state is sent as JSON and tensors: other objects are refused if a rank without elements
  of their parameter would need them.
* Changing parameters between forward and backward is an error in every strategy.
* In torch, modules inside of a unit with flat parameters have no parameters. Here ``parameters()``
  of such a module lists whole ones while they are gathered, and otherwise empty ones: these have
  dtype and device, but a gradient, ``requires_grad_`` or an optimizer's step of them raises.
* An optimizer step after a backward in ``no_sync``, whose gradients are not reduced, is an error.
* These are errors where torch continues: parameters that differ across ranks at the start,
  trainable modules added after wrapping, and an optimizer that lacks a parameter on some ranks
  only.
"""

from __future__ import annotations

from meshwright.data_parallel import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from meshwright.fsdp.exposures.exposure import FlatParameter
from meshwright.fsdp.grad_scaler import ShardedGradScaler
from meshwright.fsdp.groups import hybrid_process_groups
from meshwright.fsdp.options import (
    HYBRID_SHARDING_STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from meshwright.fsdp.unit_wrapper import fsdp_units
from meshwright.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from meshwright.fsdp.wrapper import FullyShardedDataParallel

__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "UnshardHandle",
    "always_wrap_policy",
    "enable_wrap",
    "fsdp_units",
    "fully_shard",
    "hybrid_process_groups",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

# The names under which torch's own tests look for these.
_init_intra_and_inter_node_groups = hybrid_process_groups
_get_fsdp_handles = fsdp_units
_get_fsdp_states = FullyShardedDataParallel.fsdp_modules
