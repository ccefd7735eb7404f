"""The axes over which the elements of a tensor are sharded, so that sums over it can be taken.

A DTensor knows them itself. A plain shard is marked by its maker::

    plain tensor              every rank holds the whole: nothing to sum
    plain shard, marked       each rank of the named communicators holds other elements
    DTensor, Shard on axis a  each rank of a holds other elements; on other axes the same ones
    ShardView                 each rank of its communicator holds other elements
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import Communicator
from meshwright.comm.dtensors.gradient_part import plain
from meshwright.comm.dtensors.shard_view import ShardView
from meshwright.comm.process_groups import communicator
from meshwright.errors import LayoutError
from meshwright.torch_internals.distributed import root_mesh

_MARKER = "_meshwright_spread"


@dataclass(frozen=True, slots=True)
class _Marker:
    """The communicators of one shard. Copies of the tensor, and pickles, are not marked."""

    communicators: tuple[Communicator, ...] = ()
    refusal: str = ""
    """The reason for which there is no one answer."""
    is_line: bool = False
    """True when it is 1-D memory of parameters with other shapes."""

    def __deepcopy__(self, memo: object) -> _Marker:
        return self

    def __reduce__(self) -> tuple[type[_Marker], tuple[()]]:
        return _Marker, ()


_UNMARKED = _Marker()


class ManyInOne(torch.nn.Parameter):
    """Several parameters in one flat tensor."""

    singles: tuple[torch.Tensor, ...]
    """The parameters, for whoever looks at each of them."""


def is_distributed(tensor: torch.Tensor) -> bool:
    """Check whether ``tensor`` knows its own placement, as a DTensor and a `ShardView` do."""
    return isinstance(tensor, DTensor | ShardView)


def spread_over(
    tensor: torch.Tensor, communicators: Sequence[Communicator], *, is_line: bool = False
) -> None:
    """Mark ``tensor`` as a shard: each rank of ``communicators`` holds other elements.

    ``is_line``: it is 1-D memory of parameters with other shapes.
    """
    # An attribute lives and dies with the tensor, as no table beside it can.
    axes = tuple(c for c in communicators if not c.is_alone)
    vars(tensor)[_MARKER] = _Marker(axes, is_line=is_line)


def refuse_spread(tensor: torch.Tensor, why: str) -> None:
    """Make `spread_of` raise: parts of ``tensor`` are sharded over different axes."""
    vars(tensor)[_MARKER] = _Marker(refusal=why, is_line=True)


def is_marked_spread(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, a plain one, was marked as a shard with other elements on other ranks."""
    marker = _marker_of(tensor)
    return bool(marker.communicators or marker.refusal)


def is_line(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was marked as 1-D memory of parameters with other shapes."""
    return _marker_of(tensor).is_line


def _marker_of(tensor: torch.Tensor) -> _Marker:
    marker = vars(tensor).get(_MARKER) if hasattr(tensor, "__dict__") else None
    return marker if isinstance(marker, _Marker) else _UNMARKED


def singles_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """List the parameters in ``tensor``: several for a `ManyInOne`, otherwise itself."""
    return tensor.singles if isinstance(tensor, ManyInOne) else (tensor,)


def spread_of(tensor: torch.Tensor) -> tuple[Communicator, ...]:
    """List the communicators over which ``tensor`` is sharded; none if all ranks hold it whole.

    Raises `LayoutError` for a partial sum, of which no rank holds any element, for flat memory of
    parameters that are sharded in several ways, and for a `ShardView` of a part that does not know
    the ranks of the other elements.
    """
    if isinstance(tensor, ShardView):
        return _spread_of_view(tensor)
    if not isinstance(tensor, DTensor):
        marker = _marker_of(tensor)
        if marker.refusal:
            raise LayoutError(marker.refusal)
        return marker.communicators
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("shard",) * mesh.ndim
    found: list[Communicator] = []
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise LayoutError(
                f"a tensor of shape {tuple(tensor.shape)} is a partial sum on axis {names[dim]}: "
                "reduce it first, for example with .redistribute()"
            )
        if not placement.is_replicate() and mesh.shape[dim] > 1:
            found.append(communicator(mesh.get_group(dim), axis=names[dim]))
    return tuple(found)


def _spread_of_view(view: ShardView) -> tuple[Communicator, ...]:
    if view.communicator is not None:
        return (view.communicator,) if not view.communicator.is_alone else ()
    if view.local.numel() == view.numel():
        return ()
    raise LayoutError(
        f"{view!r} holds {view.local.numel()} of {view.numel()} elements, and nobody knows who "
        "holds the others: build it with communicator="
    )


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of any tensor as a plain tensor, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor | ShardView) else plain(tensor)


def check_meshes(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `LayoutError` when a sum over DTensors of these meshes would differ between ranks.

    Meshes may differ when all hold the same ranks, or are parts of meshes that do: then every rank
    sees every tensor. Of two meshes over other ranks, some ranks see one and not the other.
    """
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}
    first = next(iter(meshes.values()), None)
    for mesh in meshes.values():
        if mesh.get_coordinate() is None:
            raise LayoutError(f"this rank is not on {mesh}, so it does not see its tensors")
        if first is not None and not _cover_the_same(first, mesh):
            raise LayoutError(
                f"tensors on {first} and on {mesh} cannot be combined: some ranks hold one and not "
                "the other, so they would find different sums. Slice both meshes from one mesh "
                "that spans all ranks, or treat the two sets of tensors one after the other"
            )


def _cover_the_same(one: DeviceMesh, other: DeviceMesh) -> bool:
    # Parts of meshes over the same ranks, too: each rank is on one part of either.
    pairs = (one, other), (root_mesh(one), root_mesh(other))
    return any({*a.mesh.flatten().tolist()} == {*b.mesh.flatten().tolist()} for a, b in pairs)
