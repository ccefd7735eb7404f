"""torch's DTensors: at rest, in computation, and in checkpoints.

Bottom-up:

    after_hooks     hooks that run once ``.grad`` of a parameter is set
    gradient_part   this rank's elements of a gradient, on which sums are refused
    subclasses      tensor subclasses: how they compute, and where their values are
    shard_view      boxes of a tensor, their gather, and a flat range of one for state dicts
    dtensor         conversion between local tensors and DTensors
    edges           DTensors that enter and leave modules, which compute on local tensors or on them
    local_leaves    local leaves, on which modules compute instead of DTensors
    exchanging      modules over whose mesh samples travel: experts
    unreadable      tensors without values: reading them raises, by name
    sharded_axes    the axes over which the elements of a tensor are spread
    gather_dtensor  full tensors from DTensors, and the parts that ranks hold
    operators       corrections of torch's operators on DTensors
"""

from __future__ import annotations

__all__: list[str] = []
