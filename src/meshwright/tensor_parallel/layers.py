"""Layers that compute on shards: linear layers, embeddings, and layers on part of a sequence.

A linear layer is one autograd node with its communication:

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

An embedding is sharded by rows of the vocabulary or by features. A lookup of another rank's row
gives zeros here; the sum over ranks is the embedding. ``padding_idx``, ``max_norm`` and
``scale_grad_by_freq`` refer to the full table.

Modules on this rank's part of a sequence have replicated parameters. During the forward these are
leaves over the local tensors (including ``self.weight``); before and after, even after an error,
they are the DTensors. Each rank uses them on other positions, so their gradients are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.gather_dtensor import side_by_side
from meshwright.comm.dtensors.local_leaves import PartialGradient, forget_unsummed, local_part_of
from meshwright.comm.streams import is_host
from meshwright.errors import LayoutError
from meshwright.layout import Partial, Placement, Replicate, Shard, chunk
from meshwright.randomness import Dropout
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
from meshwright.torch_internals.tensors import assert_soon, version_of


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
        weight: Any = module.weight  # not from `_parameters`, see `_leaves`
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
        return _by_columns(self, self._meshwright_style, input, features)


class RowLinear(WithAxis, nn.Linear):
    """A linear layer with some of the input features. Made by `RowwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the sum over ranks, laid out as the style says, with the bias added once."""
        features = self.in_features, self.out_features
        return _by_rows(self, self._meshwright_style, input, features)


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
        return _by_columns(self, self._meshwright_style, x, (self.nx, self.nf))


class RowConv1D(_Conv1D):
    """Mixin of a ``Conv1D`` with some of the input features, before the module's own class."""

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the sum over ranks, laid out as the style says, with the bias added once."""
        return _by_rows(self, self._meshwright_style, x, (self.nx, self.nf))


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
    """Return ``x`` gathered, in a backward: ``whole``, or a new gather if gradients are enabled."""
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


def check_embedding(module: nn.Embedding, name: str, *, is_by_rows: bool) -> None:
    """Raise ValueError for options that a sharded table does not support."""
    if module.sparse:
        raise ValueError(
            f"{name}: expected an embedding with dense gradients, found sparse=True: a part of a "
            "table has no sparse gradient of the whole. Build it with sparse=False"
        )
    if module.max_norm is not None and not is_by_rows:
        raise ValueError(
            f"{name}: max_norm={module.max_norm} applies to whole rows, which ColwiseParallel "
            "splits: use RowwiseParallel, or max_norm=None"
        )


class ColumnEmbedding(WithAxis, nn.Embedding):
    """An embedding with some of the features of every row. Made by `ColwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the features of this rank, laid out as the style says."""
        settings = self._meshwright_style
        site = settings.site
        ids = site.move(site.arrive(input, settings.input), Replicate()).local
        y = nn.functional.embedding(
            ids,
            _weight(self),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        given = PlacedTensor(y, Shard(y.ndim - 1), (*ids.shape, self.embedding_dim))
        return site.leave(given, settings.output, is_local=settings.is_local)


class RowEmbedding(WithAxis, nn.Embedding):
    """An embedding with some of the rows. Made by `RowwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the embedding of each id, summed over ranks and laid out as the style says.

        Raises IndexError for an id outside the table, on the CPU.
        """
        settings = self._meshwright_style
        site = settings.site
        ids = site.move(site.arrive(input, settings.input), Replicate()).local
        self._check_ids(ids, site)
        weight = _weight(self)
        start, rows = chunk(self.num_embeddings, site.axis.size, site.axis.rank)
        if len(weight) != rows:
            raise ValueError(
                f"{site.labels.name}.weight: expected {rows} of {self.num_embeddings} rows on rank "
                f"{site.axis.rank} of axis {site.axis.axis}, found {len(weight)}: a DTensor was "
                "replaced by a plain tensor"
            )
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        if not 0 <= padding < rows:
            padding = -1
        local = ids - start
        outside = (local < 0) | (local >= rows)
        if self.max_norm is not None:
            with torch.no_grad():
                kept = local[~outside].contiguous()
                torch.embedding_renorm_(weight.detach(), kept, self.max_norm, self.norm_type)
        lookup = local.masked_fill(outside, rows)
        y = _Lookup.apply(weight, lookup, outside, padding, self.scale_grad_by_freq)
        given = PlacedTensor(y, Partial(), (*ids.shape, self.embedding_dim))
        return site.leave(given, settings.output, is_local=settings.is_local)

    def _check_ids(self, ids: torch.Tensor, site: Site) -> None:
        if not is_host(ids.device):
            assert_soon(((ids >= 0) & (ids < self.num_embeddings)).all())
            return
        if not ids.numel():
            return
        least, most = (int(bound) for bound in torch.aminmax(ids))
        if least < 0 or most >= self.num_embeddings:
            raise IndexError(
                f"{site.labels.name}: index out of range: expected ids from 0 to "
                f"{self.num_embeddings - 1}, found {least} to {most}"
            )


ColumnEmbedding.__name__ = RowEmbedding.__name__ = "Embedding"  # which a printed model shows


def _weight(module: nn.Embedding) -> torch.Tensor:
    weight: Any = module.weight  # not from `_parameters`, see `_leaves`
    return local_part_of(weight)


class _Lookup(torch.autograd.Function):
    """Lookup in this rank's rows; ids of other ranks' rows, set to ``rows``, give zeros."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx,
        weight: torch.Tensor,
        ids: torch.Tensor,
        outside: torch.Tensor,
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.kept = len(weight), padding, by_frequency  # pyrefly: ignore[missing-attribute]
        if not len(weight):
            return weight.new_zeros((*ids.shape, weight.shape[1]))
        found = nn.functional.embedding(ids.masked_fill(outside, 0), weight)
        return found.masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        rows, padding, by_frequency = ctx.kept  # pyrefly: ignore[missing-attribute]
        # Gradients of other ranks' rows collect in one extra row, which is dropped.
        found = torch.ops.aten.embedding_dense_backward(grad, ids, rows + 1, padding, by_frequency)
        return found[:rows], None, None, None, None


_DROPPING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@dataclass(frozen=True, slots=True)
class Sequence:
    """The settings of the style for one module. Copies of the module share it."""

    site: Site
    dim: int | None
    """The sharded dim of the activations; None for any dim of local tensors."""
    is_local: bool
    partial: tuple[tuple[str, str, PartialGradient], ...]
    """(path of the owner, name, summing object) of each parameter."""

    def __deepcopy__(self, memo: object) -> Sequence:
        return self


class SequencePart(WithAxis):
    """The mixin that `SequenceParallel` puts before a module's own class."""

    @untraced
    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward on local tensors; the first input is the sequence.

        Raises ValueError when that is not a tensor, TypeError when the output is not. If any dim
        may be sharded, inputs and outputs are passed through unchanged.
        """
        if self._meshwright_style.dim is None:
            with self._on_leaves():
                return super().forward(*inputs, **options)
        return self._on_part(self._meshwright_style.dim, inputs, options)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Raises ValueError for a plain one in place of a DTensor."""
        settings = self._meshwright_style
        is_summed = any(not path and key == name for path, key, _ in settings.partial)
        if is_summed and param is not None and not is_dtensor(param):
            raise ValueError(
                f"{settings.site.labels.name}.{name} is a DTensor, whose gradient SequenceParallel "
                "sums over the ranks, and cannot become a plain parameter: write the values into "
                "the one that is there (with torch.no_grad(): parameter.copy_(...)), or assign it "
                "before parallelize_module"
            )
        super().register_parameter(name, param)

    @property
    def _drops(self) -> bool:
        """True for torch's dropout in training, which needs a DTensor to draw the global mask."""
        return self.training and isinstance(self, _DROPPING) and not isinstance(self, Dropout)

    def _on_part(
        self, dim: int, inputs: tuple[object, ...], options: dict[str, object]
    ) -> torch.Tensor:
        settings = self._meshwright_style
        site, name = settings.site, settings.site.labels.name
        first = inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            raise ValueError(
                f"expecting input of {self} to be a torch.Tensor or DTensor, but got {first} "
                f"({name}: the first positional input is the sequence)"
            )
        placement = Shard(dim)
        given = site.move(site.arrive(first, placement), placement)
        if self._drops:
            whole = site.leave(given, placement, is_local=False)
            output = site.arrive(super().forward(whole, *inputs[1:], **options), placement).local
        else:
            with self._on_leaves():
                output = super().forward(given.local, *inputs[1:], **options)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{name}: expected one tensor as output, found {type(output).__name__}")
        shape = list(output.shape)
        shape[dim] = given.shape[dim]
        found = PlacedTensor(output, normal(placement, output.ndim), tuple(shape))
        return site.leave(found, placement, is_local=settings.is_local)

    @contextmanager
    def _on_leaves(self) -> Iterator[None]:
        """Replace parameters by local leaves in the block; skip those that are not DTensors."""
        settings = self._meshwright_style
        forget_unsummed(settings.site.axis)
        at_rest: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        try:
            for path, key, add in settings.partial:
                owner = self.get_submodule(path)
                parameter = getattr(owner, key)
                if is_dtensor(parameter):
                    at_rest.append((owner._parameters, key, parameter))
                    part: Any = local_part_of(parameter, add)
                    owner._parameters[key] = part
            yield
        finally:
            for owner, key, parameter in at_rest:
                owner[key] = parameter
