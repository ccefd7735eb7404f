"""From the layout that a tensor has to the layout that is needed, on one axis.

The layout of a local tensor is declared by a style; a DTensor says its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.comm import Communicator
from meshwright.comm.dtensor import mesh_communicators
from meshwright.comm.edges import entered, left, placement_on
from meshwright.layout import Partial, Placement, Replicate, Shard
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.functions import (
    Labels,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)

__all__ = ["Arrival", "Site", "check_mesh", "normal"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A local tensor and what it is a part of."""

    local: torch.Tensor
    placement: Placement
    shape: tuple[int, ...] | None
    """Shape of the whole, where it is known: of a DTensor, or where nothing is cut."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a style communicates: the ranks and the module. Copies of the module share it."""

    mesh: DeviceMesh
    axis: Communicator
    labels: Labels

    def __deepcopy__(self, memo: object) -> Site:
        return self

    @staticmethod
    def of(mesh: DeviceMesh, name: str) -> Site:
        """The site of the module that is called ``name``, on a mesh of one dim."""
        return Site(mesh, mesh_communicators(mesh, "tensor")[0], Labels.of(name))

    def arrive(self, tensor: torch.Tensor, declared: Placement) -> Arrival:
        """The local tensor of ``tensor``: a DTensor says how it is placed, any other as declared.

        Raises ValueError for a DTensor on another mesh.
        """
        placement = placement_on(tensor, self.mesh, self.labels.name)
        if placement is not None:
            return Arrival(entered(tensor), placement, tuple(tensor.shape))
        placement = normal(declared, tensor.ndim)
        known = None if isinstance(placement, Shard) else tuple(tensor.shape)
        return Arrival(tensor, placement, known)

    def move(
        self, given: Arrival, wanted: Placement, *, total: int | None = None, leaves: bool = True
    ) -> Arrival:
        """``given`` as ``wanted``. A dim that is gathered has ``total`` rows, or equal chunks.

        ``leaves`` says that the result is given to the user as a local tensor: then a dim is cut
        in equal chunks only, since nothing says afterwards how long it was.
        """
        x, found = given.local, given.placement
        wanted = normal(wanted, x.ndim)
        if wanted == found:
            return given
        if isinstance(wanted, Shard) and leaves and total is None:
            self.check_equal(self.whole_shape(given), wanted.dim)
        axis, labels = self.axis, self.labels
        shape = self.whole_shape(given, total)
        match found, wanted:
            case Partial(), Replicate():
                x = reduce_from(x, axis, labels)
            case Partial(), Shard(dim=dim):
                x = reduce_scatter_to(x, axis, labels, dim=dim)
            case Replicate(), Shard(dim=dim):
                x = scatter_to(x, axis, labels, dim=dim)
            case Shard(dim=dim), Replicate():
                x = gather_from(x, axis, labels, dim=dim, total=shape[dim])
            case Shard(dim=dim), Shard(dim=to):
                x = exchange(x, axis, labels, dim=dim, to=to, total=shape[dim])
            case _:
                raise ValueError(
                    f"{labels.name}: a tensor placed {found} cannot be made {wanted}: it would "
                    "have to be taken apart into a sum. Ask for Replicate or Shard"
                )
        return Arrival(x, wanted, shape)

    def depart(self, given: Arrival, *, is_local: bool) -> torch.Tensor:
        """What the caller gets: the local tensor, or a DTensor around it."""
        if is_local:
            return given.local
        shape = self.whole_shape(given)
        return left(given.local, self.mesh, given.placement, shape, self._convert)

    def _convert(
        self, local: torch.Tensor, found: Placement, wanted: Placement, shape: Sequence[int]
    ) -> torch.Tensor:
        given = Arrival(local, normal(found, local.ndim), tuple(shape))
        return self.move(given, wanted, leaves=False).local

    def whole_shape(self, given: Arrival, total: int | None = None) -> tuple[int, ...]:
        """Shape of what ``given`` is a part of: chunks are equal unless ``total`` is known."""
        if given.shape is not None:
            return given.shape
        shape = list(given.local.shape)
        if isinstance(given.placement, Shard):
            dim = given.placement.dim
            shape[dim] = self.axis.size * shape[dim] if total is None else total
        return tuple(shape)

    def check_equal(self, shape: Sequence[int], dim: int) -> None:
        """Raise ValueError when a whole of ``shape`` does not fall into equal chunks along ``dim``.

        Of a local tensor nothing says afterwards how long the whole was.
        """
        rows = shape[dim]
        if rows % self.axis.size:
            raise ValueError(
                f"{self.labels.name}: dim {dim} has {rows} rows, which {self.axis.size} ranks of "
                f"axis {self.axis.axis} cannot hold in equal chunks, and a local tensor does not "
                "say how long the whole is: pad it, or set use_local_output=False"
            )


def normal(placement: Placement, ndim: int) -> Placement:
    """``placement`` with a dim counted from the front; ValueError for partial results but sums."""
    if isinstance(placement, Partial) and placement.reduction != "sum":
        raise ValueError(f"expected Shard, Replicate or a partial sum, found {placement}")
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ValueError unless ``mesh`` has one dim."""
    if mesh.ndim != 1:
        raise ValueError(
            f"Tensor Parallel only accepts a 1D DeviceMesh, but found {mesh.ndim}D with axes "
            f"{mesh.mesh_dim_names}: slice one of them, for example mesh['tensor']"
        )
