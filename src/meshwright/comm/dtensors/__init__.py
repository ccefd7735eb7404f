"""torch's DTensors: at rest, in computation, and in checkpoints.

Bottom-up:

    after_hooks     hooks that run once ``.grad`` of a parameter is set
    gradient_part   this rank's elements of a gradient, which no sum may be taken over
    subclasses      tensor subclasses: how they compute, and where their values are
    shard_view      boxes of a tensor, their gather, and a flat range of one for state dicts
    dtensor         conversion between local tensors and DTensors, and what was made of parameters
    edges           DTensors that enter and leave modules, which compute on local tensors or on them
    local_leaves    the leaves on which modules compute in place of DTensors
    unreadable      tensors without values: reading them raises, by name
    sharded_axes    the axes over which the elements of a tensor are spread
    gather_dtensor  full tensors from DTensors, and the parts that ranks hold
    operators       torch's operators on DTensors, so that they compute what one process does
"""

from __future__ import annotations

__all__: list[str] = []
