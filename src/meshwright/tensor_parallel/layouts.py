"""From the layout that a tensor has to the layout that is needed, on one axis.

The layout of a local tensor is declared by a style; a DTensor says its own.
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
    """Keep ``function`` of a module from being traced where its parameters are DTensors.

    A graph ends before it then, and another begins behind it. Where data parallelism has put local
    tensors in their places the function is traced, with its communication.
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
class Arrival:
    """A local tensor and what it is a part of."""

    local: torch.Tensor
    placement: Placement
    shape: tuple[int, ...]
    """Shape of the whole."""
    is_summed: bool = False
    """True when somebody else sums its gradients over ranks."""


@dataclass(frozen=True, slots=True)
class Site:
    """The ranks and the module for which a style communicates. Copies of the module share it."""

    mesh: DeviceMesh
    axis: Communicator
    labels: Labels

    def __deepcopy__(self, memo: object) -> Site:
        return self

    @staticmethod
    def of(mesh: DeviceMesh, name: str) -> Site:
        """Find the site of the module that is called ``name``, on a mesh of one dim."""
        return Site(mesh, mesh_communicators(mesh, "tensor")[0], Labels.of(name))

    def arrive(
        self,
        tensor: torch.Tensor,
        declared: Placement,
        *,
        features: int | None = None,
        is_copied: bool = False,
    ) -> Arrival:
        """Find what ``tensor`` is a part of: a DTensor says so, any other is as ``declared``.

        ``features`` is the size of the whole last dim, where that is known. Other dims of a local
        tensor are taken to be cut in equal chunks.

        ``is_copied``: a DTensor that is whole on each rank is used for a part of what is made of
        it. Its gradient goes back as a part of a sum, for whoever made it to add up.

        Raises ValueError for a DTensor on another mesh.
        """
        placement = placement_on(tensor, self.mesh, self.labels.name)
        if placement is not None:
            is_whole = isinstance(placement, Replicate)
            partial = is_copied and is_whole and tensor.grad_fn is not None
            return Arrival(
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
        return Arrival(tensor, placement, tuple(shape))

    def move(self, given: Arrival, wanted: Placement, *, complete: bool = False) -> Arrival:
        """Bring ``given`` to ``wanted``; ``complete`` is what `reduce_from` says.

        Raises ValueError where ``wanted`` is a part of a sum.
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
                    "have to be taken apart into a sum. Ask for Replicate or Shard"
                )
        return Arrival(x, wanted, shape)

    def leave(self, given: Arrival, wanted: Placement, *, is_local: bool) -> torch.Tensor:
        """Give ``given`` as ``wanted`` to the caller, local or as a DTensor.

        Raises ValueError for a local tensor whose whole does not fall into equal chunks, where
        nothing says afterwards how long it was.
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
        given = Arrival(local, normal(found, local.ndim), tuple(shape))
        if not is_backward:
            return self.move(given, wanted).local
        turned = replace(self, labels=self.labels.turned())
        if isinstance(wanted, Partial):  # of which each rank has another summand
            whole = turned.move(given, Replicate(), complete=True).local
            return copy_to(whole, self.axis, turned.labels)
        return turned.move(given, wanted, complete=True).local

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


class Cut(nn.Module):
    """A base of the classes that styles give to modules: it shows the axis."""

    _tensor_parallel: Any

    def extra_repr(self) -> str:
        """Add the axis to what the module shows of itself."""
        axis = self._tensor_parallel.site.axis
        own = super().extra_repr()
        return f"{own}{', ' if own else ''}over axis {axis.axis} of {axis.size} ranks"


def normal(placement: Placement, ndim: int) -> Placement:
    """Count the dim of ``placement`` from the front; ValueError for partial results but sums."""
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
