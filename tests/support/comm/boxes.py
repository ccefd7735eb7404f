"""The box of a DTensor that a rank holds, counted otherwise than the library counts it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from support.internals.layout import Box, chunk


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """Find this rank's box of a tensor of ``shape``: strided placements cut after all others."""
    here = mesh.get_coordinate()
    assert here is not None
    offset, lengths = [0] * len(shape), list(shape)
    cuts = [(n, p) for n, p in enumerate(placements) if type(p) is Shard]
    for number, placement in reversed(list(enumerate(placements))):
        if hasattr(placement, "split_factor"):
            later = [mesh.size(n) for n, p in cuts if n > number and p.dim == placement.dim]
            assert placement.split_factor == math.prod(later)
            cuts.append((number, placement))
    for number, placement in cuts:
        dim = placement.dim
        start, lengths[dim] = chunk(lengths[dim], mesh.size(number), here[number])
        offset[dim] += start
    return Box(tuple(offset), tuple(lengths))
