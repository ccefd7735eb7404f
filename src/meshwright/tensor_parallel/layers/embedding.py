"""Embeddings whose weights are sharded over ranks, by rows of the vocabulary or by features.

A lookup of another rank's row gives zeros here; the sum over ranks is the embedding.
``padding_idx``, ``max_norm`` and ``scale_grad_by_freq`` refer to the full table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.comm.dtensors.local_leaves import local_part_of
from meshwright.comm.streams import is_host
from meshwright.layout import Partial, Replicate, Shard, chunk
from meshwright.tensor_parallel.layouts import PlacedTensor, Site, WithAxis, untraced
from meshwright.torch_internals.tensors import assert_soon


def check_embedding(module: nn.Embedding, name: str, *, is_by_rows: bool) -> None:
    """Raise ValueError for options that a sharded table does not support."""
    if module.sparse:
        raise ValueError(
            f"{name}: expected an embedding with dense gradients, found sparse=True: a part of a "
            "table has no sparse gradient of the whole. Build it with sparse=False"
        )
    if module.max_norm is not None and not is_by_rows:
        raise ValueError(
            f"{name}: max_norm={module.max_norm} is about whole rows, which ColwiseParallel cuts: "
            "use RowwiseParallel, or max_norm=None"
        )


class ColumnEmbedding(WithAxis, nn.Embedding):
    """An embedding with some of the features of every row. Made by `ColwiseParallel`."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the features of this rank, laid out as the style says."""
        settings = self._tensor_parallel
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
        settings = self._tensor_parallel
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
    weight: Any = module.weight  # not the registered one: see `linear`
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
