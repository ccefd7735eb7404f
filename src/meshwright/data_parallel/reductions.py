"""The reductions of one reducer, built from their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.comm import Communicator
from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.in_place import InPlaceGradient
from meshwright.data_parallel.options import ReductionSettings
from meshwright.data_parallel.slots import BucketLayout
from meshwright.data_parallel.sparse_gradient import SparseGradient

__all__ = ["Reduction", "build_reductions", "gradients_in"]

Reduction = Bucket | InPlaceGradient | SparseGradient


def build_reductions(
    layouts: Sequence[BucketLayout],
    parameters: Sequence[torch.nn.Parameter],
    settings: ReductionSettings,
    communicator: Communicator,
) -> tuple[Reduction, ...]:
    """One for each layout, whose slots count ``parameters``."""
    built: list[Reduction] = []
    alone: list[InPlaceGradient] = []
    zeros = settings.zeros_for_unused
    for layout in layouts:
        members = [parameters[slot.index] for slot in layout.slots]
        if layout.is_sparse:
            built.append(SparseGradient(layout, members[0], zeros_for_unused=zeros))
            continue
        if layout.is_alone:
            alone.append(InPlaceGradient(layout, members[0], communicator.empty_shared))
            built.append(alone[-1])
            continue
        is_view = settings.is_gradient_view and all(
            parameter.dtype == layout.dtype for parameter in members
        )
        built.append(
            Bucket(
                layout,
                members,
                communicator.empty_shared(layout.numel, layout.dtype),
                is_gradient_view=is_view,
                riders=alone if layout is layouts[-1] else (),
                zeros_for_unused=zeros,
            )
        )
    return tuple(built)


def gradients_in(reductions: Sequence[Reduction]) -> Iterator[torch.Tensor]:
    """All gradients in as few tensors as hold them: whole buckets where ``.grad`` is a view.

    Of a sparse gradient the values.
    """
    for reduction in reductions:
        if isinstance(reduction, Bucket) and reduction.is_gradient_view:
            yield reduction.gradients
            continue
        for parameter in reduction.parameters:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient.coalesce().values() if gradient.is_sparse else gradient
