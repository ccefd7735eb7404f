"""Sharded parameters, unit by unit.

Bottom-up:

    policies             dtypes, and the device of shards
    gradient_lines       full gradients on their way into a reduction, and their memory
    buffer               one line of elements: the shard, the whole, and gradients
    placement            the ranks and the dim that each parameter is sharded over
    tensor_extensions    tensor subclasses that define how they are gathered
    slot                 one parameter of a unit, with all its uses and hooks of users
    parameter_group      the parameters of a unit that lie in one buffer
    replaced_parameters  tensors that users put in the place of a parameter
    unit                 parameters that are gathered and reduced together
    dtensor_exposure     what optimizers, clipping and state dicts see of a unit
    sharding             from modules to a unit
"""

from __future__ import annotations

__all__: list[str] = []
