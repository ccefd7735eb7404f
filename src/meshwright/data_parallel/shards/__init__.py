"""Sharded parameters, unit by unit.

Bottom-up:

    policies             dtypes, and the device of shards
    gradient_lines       full gradients on their way into a reduction, and their memory
    buffer               one flat buffer: the shard, the whole parameters, and gradients
    placement            the ranks and the dim that each parameter is sharded over
    tensor_extensions    tensor subclasses that define how they are gathered
    slot                 one parameter of a unit, with all its uses and user hooks
    parameter_group      the parameters of a unit that share one buffer
    replaced_parameters  refusals of tensors that users assign in place of a parameter
    unit                 parameters that are gathered and reduced together
    dtensor_exposure     what optimizers, clipping and state dicts see of a unit
    sharding             from modules to a unit
"""

from __future__ import annotations

__all__: list[str] = []
