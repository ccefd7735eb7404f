"""`FullyShardedDataParallel`, with the API of torch's class of that name, on our engine.

`fully_shard` and what belongs to it are here as well, under the names that torch's package has.

Bottom-up:

    options         strategies, precision and its modes, kinds of state dicts; also torch's own
    wrap            policies: the submodules that become units
    groups          the ranks that share parameters, and those that copy
    checks          checks of a module that becomes a unit
    exposures       the parameters of a unit as they look from outside
    traversal       the tree of wrappers, names, and lists of modules inside of a flat unit
    states          state dicts of models and optimizers, and whole parameters
    unit_wrapper    one wrapper as a module
    building        from a module to units, those that a policy chose
    wrapper         the public class
    grad_scaler     `ShardedGradScaler`

Where this differs from torch's class on purpose:

* torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` are refused for flat parameters,
  which have several names each; `optim_state_dict` and `optim_state_dict_to_load` save and load.
  With original parameters they work, and before a first step they leave the optimizer as it was.
* ``limit_all_gathers`` changes nothing: two gathers at most are ever in flight.
* An evaluation under ``torch.no_grad`` frees parameters after each unit, in every strategy.
* Modules of tensor parallelism are wrapped with the data axes of their mesh. State dicts
  are of whole parameters.
* Hooks that `register_post_accumulate_grad_hook` has put on parameters run when ``.grad`` is there;
  those of `register_hook` are refused where they would be given a piece of a gradient.
* What is put into the ``.data`` of a parameter is copied into its shard, over what was there: clone
  first what is to come back later.
* State dicts are copies of what units manage, LOCAL ones and those of optimizers too; buffers and
  ignored parameters are live in them, as in those of any module.
* Ranks may ignore other modules; numbered siblings that a rank ignores are not counted when ranks
  compare names. What they share must be equal at the start.
* Optimizer state of any kind travels as JSON and tensors: objects that neither can hold are
  refused where a rank without elements of their parameter would need them.
* Where parameters change between forward and backward that is an error in every strategy.
* Where torch's flat parameters leave modules inside of a unit without parameters, ``parameters()``
  of these lists whole ones while they are there, and empty ones else: these can be asked for their
  dtype and device, but a gradient, ``requires_grad_`` or an optimizer's step of them raises.
* An optimizer that steps after a backward in ``no_sync``, whose gradients wait, is an error.
* Where torch trains on, these are errors: parameters that are not equal on all ranks at the start,
  modules that train and were added after wrapping, an optimizer that leaves a parameter out on
  some ranks only.
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
