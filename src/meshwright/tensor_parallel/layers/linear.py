"""Linear layers whose weights are sharded over ranks: one autograd node with its communication.

::

    columns (ColwiseParallel)   y  = X W_r^T + b_r       X has all features, y some of them
                                dX = sum_r dy W_r        overlaps with the computation of dW_r
    rows (RowwiseParallel)      Y  = sum_r x_r W_r^T + b x_r has some of the features
                                dx_r = dY W_r            nothing is sent

With a layout ``Shard(dim)`` of the input (columns) or output (rows) the all-reduce is a
reduce-scatter along that dim, and the other direction an all-gather.

A column-parallel layer may have several matrices side by side, such as query, key and value. Each
rank has its shard of each, one after the other, and its output has as many parts.

A ``Conv1D`` of Hugging Face's GPT-2 stores its matrix as (input features, output features). It is
recognized by its attributes, without importing that package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.gather_dtensor import side_by_side
from meshwright.comm.dtensors.local_leaves import (
    PartialGradient,
    forget_unsummed,
    local_part_of,
)
from meshwright.errors import LayoutError
from meshwright.layout import Partial, Placement, Replicate, Shard, chunk
from meshwright.tensor_parallel.checks.following import mark
from meshwright.tensor_parallel.functions import (
    Labels,
    copy_to,
    gather_from,
    gathered,
    own_part,
    reduce_from,
    reduce_scatter_to,
    start_sum,
    start_sum_part,
)
from meshwright.tensor_parallel.layouts import PlacedTensor, Site, WithAxis, normal, untraced
from meshwright.torch_internals.tensors import version_of


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a style for one module. Copies of the module share it."""

    site: Site
    input: Placement
    output: Placement
    is_local: bool
    """True when the module returns a local tensor."""
    partial_bias: PartialGradient | None = None
    """Sums the gradient of a replicated bias of which each rank uses another part."""
    parts: int = 1
    """The number of matrices side by side in the output features."""

    @property
    def partial(self) -> tuple[tuple[str, str, PartialGradient], ...]:
        """(path of the owner, name, summing object) of each parameter with a partial gradient."""
        return () if self.partial_bias is None else (("", "bias", self.partial_bias),)

    def __deepcopy__(self, memo: object) -> Settings:
        return self


@dataclass(frozen=True, slots=True)
class _Saved:
    """The version of the weight at rest in the forward: autograd's own check sees only the leaf."""

    name: str
    weight: nn.Parameter | None
    version: int

    @staticmethod
    def of(module: nn.Module, name: str) -> _Saved:
        weight: Any = module.weight  # which data parallelism may keep, see `_leaves`
        if not is_dtensor(weight) or weight.is_inference():  # which has no version, nor a backward
            return _Saved(name, None, 0)
        return _Saved(name, weight, version_of(weight))

    def check(self) -> None:
        """Raise RuntimeError if the weight has been written since the forward."""
        if self.weight is not None and version_of(self.weight) != self.version:
            raise RuntimeError(
                f"{self.name}.weight has been modified by an inplace operation between forward and "
                f"backward (version {version_of(self.weight)}, expected {self.version}): step the "
                "optimizer after the backward, or run the forward again"
            )


@dataclass(frozen=True, slots=True)
class _Passage:
    """How the unsharded side of a layer communicates: ``dim`` None means an all-reduce."""

    axis: Communicator
    labels: Labels
    dim: int | None
    total: int
    """Rows of the full tensor along ``dim``."""
    saved: _Saved
    is_summed: bool = False
    """True when the caller's DTensor sums the gradients of the input."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` has attributes ``nx`` and ``nf``, and a weight of that shape."""
    shape = getattr(module, "nx", None), getattr(module, "nf", None)
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape


class ColumnLinear(WithAxis, nn.Linear):
    """A linear layer with some of the output features. Made by `ColwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the output features of this rank, laid out as the style says."""
        features = self.in_features, self.out_features
        return _by_columns(self, self._tensor_parallel, input, features)


class RowLinear(WithAxis, nn.Linear):
    """A linear layer with some of the input features. Made by `RowwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the sum over ranks, laid out as the style says, with the bias added once."""
        features = self.in_features, self.out_features
        return _by_rows(self, self._tensor_parallel, input, features)


ColumnLinear.__name__ = RowLinear.__name__ = "Linear"  # which a printed model shows


class _Conv1D(WithAxis):
    """The base of the classes that are mixed in before a ``Conv1D``."""

    nx: int
    nf: int


class ColumnConv1D(_Conv1D):
    """Mixin of a ``Conv1D`` with some of the output features, before the module's own class."""

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output features of this rank, laid out as the style says."""
        return _by_columns(self, self._tensor_parallel, x, (self.nx, self.nf))


class RowConv1D(_Conv1D):
    """Mixin of a ``Conv1D`` with some of the input features, before the module's own class."""

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the sum over ranks, laid out as the style says, with the bias added once."""
        return _by_rows(self, self._tensor_parallel, x, (self.nx, self.nf))


def _by_columns(
    module: nn.Module, settings: Settings, input: torch.Tensor, features: tuple[int, int]
) -> torch.Tensor:
    """Compute this rank's output; ``features`` are the full input and output features."""
    site = settings.site
    given = site.arrive(input, settings.input, features=features[0], is_copied=True)
    _check_features(features[0], given, site, "ColwiseParallel")
    dim, total = None, 0
    if isinstance(given.placement, Shard):
        dim = given.placement.dim
        total = given.shape[dim]
    else:
        given = site.move(given, Replicate())
    saved = _Saved.of(module, site.labels.name)
    passage = _Passage(site.axis, site.labels, dim, total, saved, is_summed=given.is_summed)
    weight, bias = _leaves(module, settings)
    _check_part(weight, 0, features[1], site)
    if bias is not None and settings.parts > 1:
        bias = own_part(bias.unflatten(0, (settings.parts, -1)), site.axis, 1).flatten()
    x, weight, bias = _autocast(given.local, weight, bias)
    y = _Columns.apply(x, weight, bias, passage)
    if settings.parts > 1:
        # No layout of a style matches this, so a style that takes it as Shard raises.
        return mark(y, side_by_side(y.ndim - 1, settings.parts), site.axis, site.labels.name)
    found = PlacedTensor(y, Shard(y.ndim - 1), (*y.shape[:-1], features[1]))
    return site.leave(found, settings.output, is_local=settings.is_local)


def _by_rows(
    module: nn.Module, settings: Settings, input: torch.Tensor, features: tuple[int, int]
) -> torch.Tensor:
    """Compute the sum over ranks; ``features`` are the full input and output features."""
    site = settings.site
    given = site.arrive(input, settings.input, features=features[0])
    _check_features(features[0], given, site, "RowwiseParallel")
    wanted = Shard(given.local.ndim - 1)
    given = site.move(given, wanted)
    weight, bias = _leaves(module, settings)
    _check_part(weight, 1, features[0], site)
    x, weight, bias = _autocast(given.local, weight, bias)
    shape = (*x.shape[:-1], features[1])
    output = normal(settings.output, x.ndim)
    if isinstance(output, Partial):
        y = functional.linear(x, weight)
        if bias is not None:
            # Only rank 0 adds the value, but every rank gets the gradient.
            y = y + (bias if site.axis.rank == 0 else bias - bias.detach())
        return site.leave(PlacedTensor(y, output, shape), output, is_local=settings.is_local)
    dim = output.dim if isinstance(output, Shard) else None
    if dim is not None and dim != x.ndim - 1 and settings.is_local:
        site.check_equal(shape, dim)
    total = 0 if dim is None else shape[dim]
    passage = _Passage(site.axis, site.labels, dim, total, _Saved.of(module, site.labels.name))
    y = _Rows.apply(x, weight, bias, passage)
    return site.leave(PlacedTensor(y, output, shape), output, is_local=settings.is_local)


def _leaves(module: nn.Module, settings: Settings) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return local leaves of the weight, as (output, input features), and of the bias."""
    # Read attributes, not `_parameters`: data parallelism may put the gathered ones beside them.
    given: Any = module.weight
    bias: Any = module.bias
    weight = local_part_of(given).t() if isinstance(module, _Conv1D) else local_part_of(given)
    if settings.partial_bias is not None:
        forget_unsummed(settings.site.axis)
    return weight, None if bias is None else local_part_of(bias, settings.partial_bias)


def _check_part(weight: torch.Tensor, dim: int, whole: int, site: Site) -> None:
    """Raise LayoutError for an unsharded weight that has replaced this rank's shard."""
    axis = site.axis
    if weight.shape[dim] == whole and chunk(whole, axis.size, axis.rank)[1] != whole:
        raise LayoutError(
            f"{site.labels.name}.weight is a whole tensor of shape {tuple(weight.shape)} on rank "
            f"{axis.rank} of axis {axis.axis}, and was a DTensor when the module was cut: it was "
            "given anew since. Write the values into the DTensor (copy_), or do it before"
        )


def _check_features(whole: int, given: PlacedTensor, site: Site, style: str) -> None:
    """Raise ValueError, before sending, if the input's features do not fit its layout."""
    found = given.local.shape[-1]
    last = given.local.ndim - 1
    is_cut = isinstance(given.placement, Shard) and given.placement.dim == last
    part = chunk(whole, site.axis.size, site.axis.rank)[1]
    expected = part if is_cut else whole
    if found == expected:
        return
    hint = ""
    if not is_cut and found == part:
        hint = (
            ", which is this rank's part of them. If the module before is a ColwiseParallel that "
            "leaves its output sharded, set input_layouts=Shard(-1) here (RowwiseParallel needs "
            "no gather), or output_layouts=Replicate() there"
        )
    elif is_cut and found == whole:
        hint = (
            ", which are all of them on every rank: set input_layouts=Replicate() here, or leave "
            "the output of the module before sharded"
        )
    raise ValueError(
        f"{site.labels.name} ({style}): expected an input placed {given.placement}, with "
        f"{expected} of {whole} features on rank {site.axis.rank} of axis {site.axis.axis}; found "
        f"shape {tuple(given.local.shape)}{hint}"
    )


def _autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast as autocast does before a linear layer; autograd casts gradients back."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64 or x.is_complex():
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        passage: _Passage,
    ) -> torch.Tensor:
        whole = x
        if passage.dim is not None:
            label = passage.labels.forward
            whole = gathered(x, passage.axis, label, passage.dim, passage.total)
        ctx.save_for_backward(x, weight, whole)
        ctx.passage = passage  # pyrefly: ignore[missing-attribute]
        return functional.linear(whole, weight, bias)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, whole = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        passage: _Passage = ctx.passage  # pyrefly: ignore[missing-attribute]
        needs = ctx.needs_input_grad  # pyrefly: ignore[missing-attribute]
        if torch.is_grad_enabled():  # a double backward will follow
            whole = _as_whole(x, passage)
        rows = _matrix(grad)
        finish: Callable[[], torch.Tensor] | None = None
        if needs[0]:
            passage.saved.check()
            finish = _start_sum(rows.mm(weight.conj()).view(whole.shape), passage)
        of_weight = rows.t().mm(_matrix(whole).conj()) if needs[1] else None
        of_bias = rows.sum(0) if needs[2] else None
        return None if finish is None else finish(), of_weight, of_bias, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        passage: _Passage,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.passage = passage  # pyrefly: ignore[missing-attribute]
        axis, label, dim = passage.axis, passage.labels.forward, passage.dim
        y = functional.linear(x, weight)
        start = start_sum(y, axis, label) if dim is None else start_sum_part(y, axis, label, dim)
        y = start()
        if bias is None:
            return y
        return y.add_(own_part(bias, axis, 0) if dim == x.ndim - 1 else bias)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        passage: _Passage = ctx.passage  # pyrefly: ignore[missing-attribute]
        needs = ctx.needs_input_grad  # pyrefly: ignore[missing-attribute]
        whole = _as_whole(grad, passage)
        rows = _matrix(whole)
        of_bias = None
        if needs[2]:
            # Sum the gathered gradient, which is here for the weight: no further message.
            of_bias = _matrix(_same_whole(grad, whole, passage)).sum(0)
        of_input = None
        if needs[0]:
            passage.saved.check()
            of_input = rows.mm(weight.conj()).view(x.shape)
        of_weight = rows.t().mm(_matrix(x).conj()) if needs[1] else None
        return of_input, of_weight, of_bias, None


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` with all dims but the last as one, also where it is empty."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


def _as_whole(x: torch.Tensor, passage: _Passage) -> torch.Tensor:
    """Gather the full ``x`` in a backward, where each rank uses another part of it."""
    axis, labels, dim = passage.axis, passage.labels, passage.dim
    if dim is None:
        return copy_to(x, axis, labels.turned()) if torch.is_grad_enabled() else x
    if torch.is_grad_enabled():
        turned = labels.turned()
        return gather_from(x, axis, turned, dim=dim, total=passage.total, partial=True)
    return gathered(x, axis, labels.backward, dim, passage.total)


def _same_whole(x: torch.Tensor, whole: torch.Tensor, passage: _Passage) -> torch.Tensor:
    """Return the ``whole`` of ``x`` in a backward, where every rank uses it alike."""
    if passage.dim is None:
        return x
    if not torch.is_grad_enabled():
        return whole
    turned = passage.labels.turned()
    return gather_from(x, passage.axis, turned, dim=passage.dim, total=passage.total)


def _start_sum(grad: torch.Tensor, passage: _Passage) -> Callable[[], torch.Tensor]:
    """Start to sum the gradient of an unsharded input over the ranks."""
    axis, labels, dim = passage.axis, passage.labels, passage.dim
    if passage.is_summed:
        return lambda: grad
    if torch.is_grad_enabled():
        turned = labels.turned()
        if dim is None:
            summed = reduce_from(grad, axis, turned)
        else:
            summed = reduce_scatter_to(grad, axis, turned, dim=dim)
        return lambda: summed
    if dim is None:
        return start_sum(grad, axis, labels.backward)
    return start_sum_part(grad, axis, labels.backward, dim)
