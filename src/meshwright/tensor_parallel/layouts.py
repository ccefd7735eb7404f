"""Converts tensors between layouts on one axis.

A style declares the layout of a local tensor; a DTensor has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_dtensor, mesh_communicators
from meshwright.comm.dtensors.edges import entered, left, placement_on
from meshwright.comm.graphs.untraced import apart
from meshwright.layout import Partial, Placement, Replicate, Shard
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.checks.following import check_mark, mark
from meshwright.tensor_parallel.checks.passes import check_whole
from meshwright.tensor_parallel.functions import (
    Labels,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from meshwright.torch_internals.tracing import not_traced

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def untraced(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Keep ``function`` of a module out of traces while the module's parameters are DTensors.

    The graph breaks around it then. If data parallelism has replaced them by local tensors, the
    function is traced with its communication.
    """
    outside = not_traced(function)

    @functools.wraps(function)
    @apart
    def call(first: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() and not _computes_locally(first):
            return outside(first, *args, **kwargs)
        return function(first, *args, **kwargs)

    return call


def _computes_locally(module: object) -> bool:
    if not isinstance(module, nn.Module) or not module._parameters:
        return False
    return not any(is_dtensor(parameter) for parameter in module._parameters.values())


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A local tensor with its placement and global shape."""

    local: torch.Tensor
    placement: Placement
    shape: tuple[int, ...]
    """The global shape."""
    is_summed: bool = False
    """True when the DTensor that it came from sums its gradients over ranks."""


@dataclass(frozen=True, slots=True)
class Site:
    """The mesh, axis and labels of one styled module. Copies of the module share it."""

    mesh: DeviceMesh
    axis: Communicator
    labels: Labels

    def __deepcopy__(self, memo: object) -> Site:
        return self

    @staticmethod
    def of(mesh: DeviceMesh, name: str) -> Site:
        """Make the site of the module called ``name``, on a mesh of one dim."""
        return Site(mesh, mesh_communicators(mesh, "tensor")[0], Labels.of(name))

    def arrive(
        self,
        tensor: torch.Tensor,
        declared: Placement,
        *,
        features: int | None = None,
        is_copied: bool = False,
    ) -> PlacedTensor:
        """Convert an input: a DTensor has its own layout, any other tensor the ``declared`` one.

        ``features`` is the full size of the last dim, if known. Other sharded dims of a local
        tensor are assumed to have equal chunks.

        ``is_copied``: each rank uses a replicated DTensor for another part of the result. Its
        gradient goes back as Partial, and the DTensor's origin sums it.

        Raises ValueError for a DTensor on another mesh.
        """
        placement = placement_on(tensor, self.mesh, self.labels.name)
        if placement is not None:
            is_whole = isinstance(placement, Replicate)
            partial = is_copied and is_whole and tensor.grad_fn is not None
            return PlacedTensor(
                entered(tensor, partial=partial), placement, tuple(tensor.shape), is_summed=partial
            )
        placement = normal(declared, tensor.ndim)
        check_mark(tensor, placement, self.axis, self.labels.name)
        if isinstance(placement, Replicate) and not torch.compiler.is_compiling():
            check_whole(tensor, self.axis, self.labels.name)
        shape = list(tensor.shape)
        if isinstance(placement, Shard):
            dim = placement.dim
            shape[dim] *= self.axis.size
            if features is not None and dim == tensor.ndim - 1:
                shape[dim] = features
        return PlacedTensor(tensor, placement, tuple(shape))

    def move(
        self, given: PlacedTensor, wanted: Placement, *, complete: bool = False
    ) -> PlacedTensor:
        """Convert ``given`` to ``wanted``; ``complete`` as in `reduce_from`.

        Raises ValueError for a conversion to Partial.
        """
        x, found = given.local, given.placement
        wanted = normal(wanted, x.ndim)
        if wanted == found:
            return given
        axis, labels, shape = self.axis, self.labels, given.shape
        match found, wanted:
            case Partial(), Replicate():
                x = reduce_from(x, axis, labels, complete=complete)
            case Partial(), Shard(dim=dim):
                x = reduce_scatter_to(x, axis, labels, dim=dim, complete=complete)
            case Replicate(), Shard(dim=dim):
                x = scatter_to(x, axis, labels, dim=dim)
            case Shard(dim=dim), Replicate():
                x = gather_from(x, axis, labels, dim=dim, total=shape[dim])
            case Shard(dim=dim), Shard(dim=to):
                x = exchange(x, axis, labels, dim=dim, to=to, total=shape[dim])
            case _:
                raise ValueError(
                    f"{labels.name}: a tensor placed {found} cannot be made {wanted}: it would "
                    "have to be split into summands. Use Replicate or Shard"
                )
        return PlacedTensor(x, wanted, shape)

    def leave(self, given: PlacedTensor, wanted: Placement, *, is_local: bool) -> torch.Tensor:
        """Return ``given`` converted to ``wanted``, as a local tensor or DTensor.

        Raises ValueError for a local tensor of unequal chunks, see `check_equal`.
        """
        wanted = normal(wanted, given.local.ndim)
        if not is_local:
            ends = given.placement, wanted
            return left(given.local, self.mesh, ends, given.shape, self._convert)
        if isinstance(wanted, Shard) and wanted != given.placement:
            self.check_equal(given.shape, wanted.dim)
        return mark(self.move(given, wanted).local, wanted, self.axis, self.labels.name)

    def _convert(
        self,
        local: torch.Tensor,
        found: Placement,
        wanted: Placement,
        shape: Sequence[int],
        is_backward: bool,
    ) -> torch.Tensor:
        given = PlacedTensor(local, normal(found, local.ndim), tuple(shape))
        if not is_backward:
            return self.move(given, wanted).local
        turned = replace(self, labels=self.labels.turned())
        if isinstance(wanted, Partial):  # replicate it: each rank's summand has the full gradient
            whole = turned.move(given, Replicate(), complete=True).local
            return copy_to(whole, self.axis, turned.labels)
        return turned.move(given, wanted, complete=True).local

    def check_equal(self, shape: Sequence[int], dim: int) -> None:
        """Raise ValueError if the global ``shape`` does not divide into equal chunks along ``dim``.

        A local tensor does not store the global size, which could not be recovered.
        """
        rows = shape[dim]
        if rows % self.axis.size:
            raise ValueError(
                f"{self.labels.name}: dim {dim} has {rows} rows, which {self.axis.size} ranks of "
                f"axis {self.axis.axis} cannot hold in equal chunks, and a local tensor does not "
                "say how long the whole is: pad it, or set use_local_output=False"
            )


class WithAxis(nn.Module):
    """The base of the classes that styles give to modules; its repr shows the axis."""

    _meshwright_style: Any

    def extra_repr(self) -> str:
        """Add the axis to the module's own ``extra_repr``."""
        axis = self._meshwright_style.site.axis
        own = super().extra_repr()
        return f"{own}{', ' if own else ''}over axis {axis.axis} of {axis.size} ranks"


def normal(placement: Placement, ndim: int) -> Placement:
    """Make the dim of ``placement`` non-negative; ValueError for a Partial that is no sum."""
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
