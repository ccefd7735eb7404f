"""Communication hooks, which reduce a bucket of gradients in another way than by a plain sum.

Each is ``hook(state, bucket)``, for ``register_comm_hook`` of a replicated module. An axis as state
is a process group, a `Communicator`, or None for the module's own axis. Hooks written for torch's
protocol work unchanged::

    hook                             what is sent                       state
    allreduce_hook                   the gradients                      an axis
    fp16_compress_hook, bf16_..      the gradients in half precision    an axis
    fp16_compress_wrapper(hook), ..  as ``hook``, in half precision     that of ``hook``
    quantization_pertensor_hook, ..  8 bits per element, and a scale    an axis
    powerSGD_hook, batched_..        two thin matrices, see `power_sgd` PowerSGDState
    post_localSGD_hook               the gradients, later in a subgroup PostLocalSGDState
    optimizer_in_backward_hook       as the inner hook, then a step     OptimizerInBackward
    noop_hook                        nothing                            anything

Bottom-up:

    sums         sums, half precision, quantization, sums in subgroups and steps
    power_sgd    two thin matrices
    shard_hooks  hooks of sharded and hybrid units
"""

from __future__ import annotations

from meshwright.data_parallel.comm_hooks.power_sgd import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from meshwright.data_parallel.comm_hooks.sums import (
    OptimizerInBackward,
    PostLocalSGDState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    optimizer_in_backward_hook,
    post_localSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from meshwright.data_parallel.replicas.gradient_bucket import GradBucket

__all__ = [
    "GradBucket",
    "OptimizerInBackward",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "optimizer_in_backward_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
