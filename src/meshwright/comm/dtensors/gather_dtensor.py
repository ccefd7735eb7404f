"""Full tensors from sharded DTensors, and the parts that a rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from meshwright.comm.dtensors.dtensor import (
    AnyPlacement,
    AtRest,
    at_rest,
    dtensor_around,
    dtensor_at_rest,
    is_replicated,
    local_of,
    mesh_communicators,
    ranges_at,
    torch_placements,
)
from meshwright.comm.dtensors.shard_view import (
    Ranges,
    ShardView,
    boxes_in,
    gather_boxes,
    length_of,
)
from meshwright.comm.process_groups import communicator
from meshwright.errors import LayoutError
from meshwright.layout import Box
from meshwright.torch_internals.distributed import (
    ShardedTensor,
    StridedShard,
    asks_for_size_alone,
    group_of,
    keep_strided_classes,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedPiece:
    """This rank's part of a global tensor.

    ``tensor`` holds the elements of ``boxes``, one box after another, each row-major. For a shard
    of a flat buffer it is the 1-D shard with ``layout.boxes(shape, start, stop)``; for a chunk
    along a dim it is the chunk with its single box. A rank that holds nothing passes no boxes and
    an empty tensor.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        whole = Box.whole(self.global_shape)
        for box in self.boxes:
            is_alike = len(box.shape) == len(whole.shape)
            if not is_alike or (box.numel and box.intersect(whole) != box):
                raise ValueError(f"{box} does not lie in global_shape {self.global_shape}")
        expected = sum(box.numel for box in self.boxes)
        if self.tensor.numel() != expected:
            raise ValueError(
                f"expected a tensor of {expected} elements for boxes {self.boxes},"
                f" found shape {tuple(self.tensor.shape)}"
            )


def held(tensor: torch.Tensor, name: str) -> ShardedPiece:
    """Return this rank's part of a DTensor or `ShardView`, all of another; nothing is sent.

    Raises `LayoutError`, with ``name``, for a Partial.
    """
    if not isinstance(tensor, DTensor):  # of which the part is detached, in a tenth of the time
        tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    parts = held_boxes(tensor, name)
    local = tensor.local if isinstance(tensor, ShardView) else local_of(tensor).detach()
    # One box after the other: that of several dims is not, nor one whose rows others part.
    is_in_order = local.ndim == 1 and all(memory.is_contiguous() for _, memory in parts)
    if len(parts) > 1 and not is_in_order:
        local = torch.cat([memory.flatten() for _, memory in parts])
    boxes = tuple(box for box, _ in parts)
    return ShardedPiece(global_shape=tuple(tensor.shape), boxes=boxes, tensor=local)


def empty_part_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized tensor of ``dtype``, shaped and placed as ``tensor``."""
    if isinstance(tensor, ShardView):
        return torch.empty_like(tensor, dtype=dtype)
    local = torch.empty_like(local_of(tensor).detach(), dtype=dtype)
    return dtensor_around(local, at_rest(tensor)) if isinstance(tensor, DTensor) else local


@torch.no_grad()
def whole(tensor: torch.Tensor, *, label: str = "whole tensor") -> torch.Tensor:
    """Gather the full ``tensor`` on every rank; all but DTensors and ShardedTensors are unchanged.

    All ranks of its mesh or group call it together: one gather for each axis that shards.
    """
    tensor = without_chunks(tensor, label)
    if not isinstance(tensor, DTensor):
        return tensor
    rest = at_rest(tensor)
    cutting = [n for n, placement in enumerate(rest.placements) if not is_replicated(placement)]
    here = rest.mesh.get_coordinate()
    if here is None:
        raise LayoutError(f"{label}: this rank is not on {rest.mesh}, which holds the tensor")
    # Of all ranks that differ from this one along the axes that shard, in their order.
    indices = [range(rest.mesh.size(n)) if n in cutting else (i,) for n, i in enumerate(here)]
    places = [_ranges(rest, place, label) for place in itertools.product(*indices)]
    # Parts may differ in size; all travel in the largest.
    room = max(math.prod(map(length_of, ranges)) for ranges in places)
    axes = mesh_communicators(rest.mesh)
    # What was offloaded to the host goes by the device, and comes back.
    device = axes[0].device if cutting else rest.local.device
    # Zeros, as what pads a smaller part is sent, too.
    everyone = torch.zeros(room, dtype=rest.local.dtype, device=device)
    everyone[: rest.local.numel()] = rest.local.detach().reshape(-1)
    # The last dim of the mesh first: parts then come in the order of `places`.
    for number in reversed(cutting):
        gathered = everyone.new_empty(axes[number].size * everyone.numel())
        axes[number].all_gather(gathered, everyone, label=label).wait()
        everyone = gathered
    found = rest.local.new_empty(rest.shape)
    for ranges, part in zip(places, everyone.view(len(places), room), strict=True):
        shape = [length_of(each) for each in ranges]
        local = part[: math.prod(shape)].view(shape)
        for box, memory in boxes_in(ranges, local):
            found[box.slices()] = memory
    return found


def without_chunks(tensor: Any, label: str) -> Any:  # noqa: ANN401 - what is no such tensor stays
    """Gather a full ShardedTensor, as torch's FSDP1 and loaders make it; others are unchanged."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    mine = [(s.metadata, s.tensor.detach()) for s in tensor.local_shards()]
    parts = [(Box(tuple(at.shard_offsets), tuple(at.shard_sizes)), own) for at, own in mine]
    return gather_boxes(communicator(group_of(tensor)), parts, tensor, label)[0]


@torch.no_grad()
def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut this rank's part out of the full ``tensor``, placed as ``like``; nothing is sent.

    Raises `LayoutError` when their shapes differ.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    rest = at_rest(like)
    if tuple(tensor.shape) != rest.shape:
        raise LayoutError(f"expected a tensor of shape {rest.shape}, found {tuple(tensor.shape)}")
    return part(tensor, rest.mesh, rest.placements, rest.stride)


@torch.no_grad()
def part(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement],
    stride: Sequence[int],
) -> DTensor:
    """Copy this rank's part of the full ``tensor`` into a DTensor; nothing is sent.

    ``stride`` is the stride of the full tensor.
    """
    spread, shape = torch_placements(placements), tuple(tensor.shape)
    rest = AtRest(local=tensor, mesh=mesh, placements=spread, shape=shape, stride=tuple(stride))
    coordinate = mesh.get_coordinate()
    ranges: list[Ranges] = [[] for _ in shape]
    if coordinate is not None:
        ranges = _ranges(rest, coordinate, "a tensor")
    local = tensor.new_empty([length_of(each) for each in ranges])
    for box, memory in boxes_in(ranges, local):
        memory.copy_(tensor[box.slices()])
    return dtensor_at_rest(local, mesh, spread, shape, stride)


def held_boxes(tensor: torch.Tensor, name: str = "a tensor") -> list[tuple[Box, torch.Tensor]]:
    """List the boxes of the full ``tensor`` that this rank holds, each with its local memory.

    One box for a plain tensor and for a plain placement; several if a strided placement gives this
    rank rows from several places of a dim; none if it holds nothing. Raises `LayoutError`, with
    ``name``, for a partial sum.
    """
    if isinstance(tensor, ShardView):
        return tensor.boxes()
    if not isinstance(tensor, DTensor):
        return [(Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor.detach())]
    rest = at_rest(tensor)
    coordinate = rest.mesh.get_coordinate()
    local = rest.local.detach()
    return [] if coordinate is None else boxes_in(_ranges(rest, coordinate, name), local)


def side_by_side(dim: int, parts: int) -> TorchPlacement:
    """The placement of ``parts`` tensors joined along ``dim``: a rank holds a part of each."""
    keep_strided_classes()
    return _SideBySide(dim, split_factor=parts)


class _SideBySide(StridedShard):
    """A strided placement whose parts are no box; raises where torch treats them as one."""

    def _local_shard_size_and_offset(
        self,
        curr_local_size: int,
        num_chunks: int,
        rank: int | torch.SymInt,
        *mode: Any,
        **modes: Any,
    ) -> tuple[int, int | list[int] | None]:
        """Compute the size. Raises NotImplementedError for callers in torch that would copy a
        single box: its checkpoints, and broadcasts from rank 0 into a state dict.
        """
        if num_chunks > 1 and not asks_for_size_alone(*mode, **modes):
            raise NotImplementedError(
                f"{self.split_factor} tensors lie side by side along dim {self.dim}, and each rank "
                "has a part of each: not one box, as torch.distributed.checkpoint and "
                "broadcast_from_rank0 expect it. Use full_state_dict=True, or a Trainable's state"
            )
        return super()._local_shard_size_and_offset(
            curr_local_size, num_chunks, rank, *mode, **modes
        )


def ranges_held(rest: AtRest, name: str) -> list[Ranges]:
    """List for each dim of a DTensor the rows of the full tensor that this rank holds.

    Raises `LayoutError`, with ``name``, for a partial sum, and on a rank outside its mesh.
    """
    here = rest.mesh.get_coordinate()
    if here is None:
        raise LayoutError(f"{name}: this rank is not on {rest.mesh}, which holds the tensor")
    return _ranges(rest, here, name)


def is_side_by_side(rest: AtRest, dim: int) -> bool:
    """Check whether ranks hold rows from several places of ``dim``, unfit for more sharding."""
    return len(_ranges(rest, (0,) * rest.mesh.ndim, "a tensor")[dim]) > 1


def _ranges(rest: AtRest, coordinate: Sequence[int], name: str) -> list[Ranges]:
    """List, for each dim, what the rank at ``coordinate`` of the mesh holds."""
    for placement in rest.placements:
        if not (is_replicated(placement) or isinstance(placement, TorchShard | StridedShard)):
            raise LayoutError(
                f"{name!r} is placed {list(rest.placements)} on {rest.mesh}: expected "
                "whole values, not summands"
            )
    return ranges_at(rest.shape, rest.mesh, rest.placements, coordinate)
