"""torch's DTensors: at rest, in computation, and in checkpoints.

Bottom-up:

    after_hooks     hooks that run when ``.grad`` of a parameter is there
    gradient_part   this rank's elements of a gradient, which no sum may be taken over
    subclasses      tensor subclasses: how they compute, and where their values are
    dtensor         conversion between local tensors and DTensors, and what was made of parameters
    edges           DTensors that enter and leave what computes on local tensors
    local_leaves    the leaves on which modules compute in place of DTensors
    styled          modules that compute on DTensors, by styles of torch's protocol
    unreadable      tensors without values, which are refused by name
    ranges          rows from several places along a dim, and the boxes that they make
    shard_view      a flat range of the elements of a tensor, for state dicts
    sharded_axes    the axes that the elements of a tensor lie spread over
    gather_dtensor  whole tensors from DTensors, and the parts that ranks hold
    operators       torch's operators on DTensors, so that they compute what one process does
"""

from __future__ import annotations

__all__: list[str] = []
