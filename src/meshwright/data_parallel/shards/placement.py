"""Placements of parameters: the ranks each is sharded over, its dim, and its form at rest.

A plain parameter is sharded over one dim of the data mesh. A parameter that is a DTensor already,
on the axes of tensor parallelism, is sharded once more: this rank's part of it over the data axes::

    given                          at rest                                computes as
    plain                          (Shard(0),) on ("shard",)              plain
    plain, 2-D mesh                (Replicate(), Shard(0))                plain
    (Shard(1),) on ("tensor",)     (Shard(0), Shard(1)) on both axes      the DTensor it was, or
                                                                          its local tensor
    (Replicate(), Shard(0)) on     (Shard(0), Shard(0)) on the same mesh, the DTensor it was
    ("shard", "tensor")            the first strided: it splits last
    (Shard(0),) on ("ep",) of a    (Shard(0), Shard(0)) on what the data  the DTensor it was
    module that exchanges samples  mesh has beside "ep", and "ep"
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.comm.dtensors.dtensor import (
    AtRest,
    concatenated_mesh,
    cut_once_more,
    flattened_mesh,
    is_replicated,
    known_at_rest,
    mesh_beside,
    mesh_communicators,
)
from meshwright.comm.dtensors.exchanging import check_split
from meshwright.comm.dtensors.gather_dtensor import is_side_by_side
from meshwright.data_parallel.distributed_parameters import check_axes
from meshwright.data_parallel.shards.buffer import DataAxes
from meshwright.data_parallel.shards.policies import DataParallelMeshDims
from meshwright.layout import Placement, Replicate, Shard
from meshwright.mesh import DeviceMesh

PlacementChoice = Callable[[torch.nn.Parameter], Any]
"""Gives for a parameter None (dim 0), a placement with a ``dim``, or a `ShardPlacementResult`."""


@dataclass(frozen=True, kw_only=False)
class ShardPlacementResult:
    """The result of a ``shard_placement_fn`` for a parameter with a mesh of its own."""

    placement: Any
    """Has the ``dim`` to shard along; None for dim 0."""
    mesh_info: Any
    """A `DeviceMesh` of one or two dims, or something that has one as ``mesh``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The data axes that `fully_shard` shards over, with the mesh around them."""

    mesh: DeviceMesh
    """The data axes alone: (shard), (replicate, shard), or (replicate) where ``cuts`` is False."""
    axes: DataAxes
    cuts: bool = True
    around: DeviceMesh | None = None
    """The mesh of all axes that the parameters are DTensors on already."""
    dims: DataParallelMeshDims | None = None
    """The names of ``around`` that are the data axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The placement of one parameter."""

    axes: DataAxes
    dim: int
    """The dim to shard along, of this rank's part of the tensor."""
    mesh: DeviceMesh
    """The mesh of the DTensor at rest."""
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    """Of the full tensor, over all axes."""
    outer: AtRest | None = None
    """The DTensor that it was, and is again while it computes."""
    kept: tuple[int, ...] = ()
    """Dims of the mesh of ``outer`` over which this library sums gradients."""


def target_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> Target:
    """Return the data axes of ``mesh``. Raises ValueError or AssertionError for an unfit mesh."""
    if dims is not None:
        return _named_target(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, for example "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))'
        )
    communicators = mesh_communicators(mesh)
    replicate = communicators[0] if len(communicators) == 2 else None
    return Target(mesh=mesh, axes=DataAxes(shard=communicators[-1], replicate=replicate))


def _named_target(mesh: DeviceMesh, dims: DataParallelMeshDims) -> Target:
    known = mesh.mesh_dim_names
    if known is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.replicate_names, *dims.shard_names):
        if name not in known:
            raise ValueError(
                f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {known}. dp_mesh_dims "
                "names the dims of the mesh that is passed with it"
            )
    parts = [flattened_mesh(mesh, n) for n in (dims.replicate_names, dims.shard_names) if n]
    groups = [mesh_communicators(part)[0] for part in parts]
    cuts = bool(dims.shard_names)
    axes = DataAxes(
        shard=groups[-1] if cuts else None, replicate=groups[0] if dims.replicate_names else None
    )
    data = parts[0] if len(parts) == 1 else concatenated_mesh(parts)
    return Target(mesh=data, axes=axes, cuts=cuts, around=mesh, dims=dims)


def place(
    name: str,
    parameter: torch.nn.Parameter,
    target: Target,
    choose: PlacementChoice | None,
    over: DeviceMesh | None = None,
) -> Place:
    """Return the placement of ``parameter``; ``choose`` is the user's ``shard_placement_fn``.

    ``over`` is the mesh over which its module exchanges samples, if it does.

    Raises AssertionError for a dim that the parameter does not have, NotImplementedError for one
    that must split evenly and cannot, ValueError for an invalid placement or another mesh.
    """
    choice = None if choose is None else choose(parameter)
    dim, chosen = _chosen(choice, target)
    outer = known_at_rest(parameter)
    target = chosen if over is None else _beside(name, outer, over, target, chosen)
    local = tuple(parameter.shape) if outer is None else tuple(outer.local.shape)
    dim = _checked_dim(name, dim, local)
    parts = target.axes.parts
    if outer is None and dim and local[dim] % parts:
        raise _uneven(name, dim, local, parts)
    if outer is None:
        if target.around is not None:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full mesh. "
                f"Got a plain tensor for {name!r}: distribute the module first"
            )
        placements = _data_placements(target.mesh.ndim, dim, cuts=target.cuts)
        return Place(
            axes=target.axes, dim=dim, mesh=target.mesh, placements=placements, shape=local
        )
    if not target.axes.communicators:
        return Place(
            axes=target.axes,
            dim=dim,
            mesh=outer.mesh,
            placements=outer.placements,
            shape=outer.shape,
            outer=outer,
        )
    return _place_again(name, outer, target, dim, is_chosen=choice is not None)


def check_exchange(path: str, over: DeviceMesh, axes: DataAxes) -> None:
    """Raise ValueError unless gradients on ``axes`` are summed over ``over`` by a reduce-scatter.

    Module ``path`` exchanges samples over ``over``.
    """
    (exchange,) = mesh_communicators(over)
    if axes.exchange is not None or exchange.is_alone:
        return
    where = f"module {path!r} exchanges samples over axis {exchange.axis!r}, "
    replicate, shard, axis = axes.replicate, axes.shard, exchange.axis
    if replicate is not None and len({*replicate.ranks} & {*exchange.ranks}) > 1:
        raise ValueError(
            f"{where}which is in the replicate dim {replicate.axis!r} of the mesh passed to "
            f"fully_shard: its ranks hold other experts, not copies. {_DENSE.format(axis)}"
        )
    if shard is None or not {*exchange.ranks} <= {*shard.ranks}:
        found = "no ranks" if shard is None else f"ranks {list(shard.ranks)}"
        raise ValueError(
            f"{where}ranks {list(exchange.ranks)}, and parameters beside it are sharded over "
            f"{found}: gradients of other ranks' samples would be left out. {_DENSE.format(axis)}"
        )


_DENSE = (
    'Shard over all ranks with samples of their own: mesh=mesh["shard", {0!r}]._flatten("dense")'
)


def _beside(
    name: str, outer: AtRest | None, over: DeviceMesh, target: Target, chosen: Target
) -> Target:
    """The data axes of experts: those that the user has ``chosen``, or ``target`` without ``over``.

    Both exclude ``over``, whose ranks hold other experts. The divisor stays that of ``target``.
    """
    (exchange,) = mesh_communicators(over)
    check_split(name, outer, over)
    data = target.axes
    own = replace(chosen.axes, exchange=exchange)
    ranks = () if data.shard is None else data.shard.ranks
    if chosen.mesh != target.mesh:
        is_within = own.shard is not None and {*own.shard.ranks} <= {*ranks}
        if is_within and own.size == data.size:
            return replace(chosen, axes=own)
        raise ValueError(
            f"parameter {name!r} of experts over axis {exchange.axis!r}: its shard_placement_fn "
            f"puts it on {chosen.mesh}, which with that axis is not {target.mesh}. Let it return a "
            "dim alone"
        )
    left = mesh_beside(over, ranks)
    meshes = [] if data.replicate is None else [target.mesh[data.replicate.axis]]
    meshes += [] if left is None else [left]
    axes = DataAxes(
        shard=None if left is None else mesh_communicators(left)[0],
        replicate=data.replicate,
        exchange=exchange,
    )
    mesh = concatenated_mesh(meshes) if len(meshes) > 1 else (*meshes, over)[0]
    return Target(mesh=mesh, axes=axes, cuts=left is not None)


def _place_again(name: str, outer: AtRest, target: Target, dim: int, *, is_chosen: bool) -> Place:
    """The placement of a DTensor on its own axes and those of the data.

    A dim that is split twice must split evenly; otherwise another dim that does is sharded, unless
    the user has chosen ``dim``. Where no dim does, dim 0 is split unevenly, as torch does.
    """
    if target.around is None or target.dims is None:
        for axis in target.axes.communicators:
            check_axes(name, outer, axis)
        mesh = concatenated_mesh([target.mesh, outer.mesh])
        data = _data_placements(target.mesh.ndim, dim, cuts=target.cuts)
        placements = [*data, *outer.placements]
        shard, kept = target.mesh.ndim - 1, ()
    else:
        kept = _check_replicated(name, outer, target.around, target.dims)
        mesh, placements, shard = _around(outer, target, target.dims)
        placements[shard] = Shard(dim) if target.cuts else placements[shard]
    spread = (
        cut_once_more(placements, mesh, shard, dim) if target.cuts else (tuple(placements), False)
    )
    parts = target.axes.parts
    # By the full shape: ranks of the other axes have parts of other sizes, and must decide alike.
    pieces = parts * _times_cut(outer, dim)
    is_split = is_side_by_side(outer, dim)
    is_uneven = (spread[1] or dim != 0) and outer.shape[dim] % pieces != 0
    if parts > 1 and (is_split or is_uneven):
        if is_chosen and is_split:
            raise NotImplementedError(
                f"{name!r} of shape {outer.shape} is several tensors side by side along dim {dim}, "
                "each cut over tensor ranks: choose another dim to shard"
            )
        other = None if is_chosen else even_dim(outer, parts)
        if other is not None:
            return _place_again(name, outer, target, other, is_chosen=True)
        if is_split or dim:
            raise _uneven(name, dim, outer.shape, pieces)
    return Place(
        axes=target.axes,
        dim=dim,
        mesh=mesh,
        placements=spread[0],
        shape=outer.shape,
        outer=outer,
        kept=kept,
    )


def _times_cut(outer: AtRest, dim: int) -> int:
    """The number of parts that ``dim`` of a DTensor is already split into."""
    sizes = zip(outer.mesh.shape, outer.placements, strict=True)
    return math.prod(size for size, each in sizes if getattr(each, "dim", None) == dim)


def even_dim(outer: AtRest, parts: int) -> int | None:
    """The first dim that splits evenly into ``parts`` more, or dim 0 if nothing splits it yet."""
    for dim, size in enumerate(outer.shape):
        times = _times_cut(outer, dim)
        is_even = not size % (times * parts) or (dim == 0 and times == 1)
        if is_even and not is_side_by_side(outer, dim):
            return dim
    return None


def _around(
    outer: AtRest, target: Target, dims: DataParallelMeshDims
) -> tuple[DeviceMesh, list[Any], int]:
    """Return the mesh at rest, its placements before sharding, and which of its dims shards."""
    names = outer.mesh.mesh_dim_names or ()
    if len(dims.shard_names) < 2 and len(dims.replicate_names) < 2:
        cutting = names.index(dims.shard_names[0]) if dims.shard_names else 0
        return outer.mesh, list(outer.placements), cutting
    # Several names count as one axis, so that its chunks are those of one split.
    others = [name for name in names if name not in (*dims.shard_names, *dims.replicate_names)]
    meshes = [target.mesh, *(outer.mesh[name] for name in others)]
    placements: list[Any] = [Replicate() for _ in range(target.mesh.ndim)]
    placements += [outer.placements[names.index(name)] for name in others]
    return concatenated_mesh(meshes), placements, target.mesh.ndim - 1


def _check_replicated(
    name: str, outer: AtRest, around: DeviceMesh, dims: DataParallelMeshDims
) -> tuple[int, ...]:
    if outer.mesh != around:
        raise ValueError(
            f"expected {name!r} to be a DTensor on the mesh passed to fully_shard, {around}; found "
            f"it on {outer.mesh}"
        )
    names = around.mesh_dim_names or ()
    found = tuple(names.index(each) for each in (*dims.replicate_names, *dims.shard_names))
    for index in found:
        if not is_replicated(outer.placements[index]):
            raise ValueError(
                f"Expected Replicate() on data dim {names[index]!r} (index {index}) of {name!r} "
                f"but got {outer.placements[index]}"
            )
    return found


def _chosen(choice: Any, target: Target) -> tuple[int, Target]:  # noqa: ANN401
    if choice is None:
        return 0, target
    if hasattr(choice, "mesh_info"):
        info = choice.mesh_info
        mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"Invalid shard_placement_fn result: no mesh in {choice!r}")
        target = target_of(mesh) if mesh != target.mesh else target
        choice = choice.placement
        if choice is None:
            return 0, target
    dim = getattr(choice, "dim", None)
    if not isinstance(dim, int):
        raise ValueError(
            f"Invalid shard_placement_fn result: {choice!r}. Return None, Shard(dim), or "
            "ShardPlacementResult(Shard(dim), mesh)"
        )
    return dim, target


def _checked_dim(name: str, dim: int, shape: tuple[int, ...]) -> int:
    found = dim + len(shape) if dim < 0 else dim
    if not 0 <= found < len(shape):
        raise AssertionError(
            f"Shard dim {dim} is invalid for {len(shape)}D tensor {name!r} of shape {shape}"
        )
    return found


def _uneven(name: str, dim: int, shape: tuple[int, ...], parts: int) -> NotImplementedError:
    return NotImplementedError(
        f"FSDP does not support uneven sharding on dim {dim}: {name!r} of shape {shape} over "
        f"{parts} ranks. Choose dim 0 of a plain tensor, or a dim that {parts} divides"
    )


@functools.cache
def _data_placements(ndim: int, dim: int, *, cuts: bool) -> tuple[Placement, ...]:
    last: Placement = Shard(dim) if cuts else Replicate()
    return (*(Replicate() for _ in range(ndim - 1)), last)
