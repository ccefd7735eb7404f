"""The reductions of a reducer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm import Communicator
from meshwright.data_parallel.replicas.alone import InPlaceGradient, SparseGradient
from meshwright.data_parallel.replicas.buckets import Bucket
from meshwright.data_parallel.replicas.gradient_bucket import RegisteredHook
from meshwright.data_parallel.replicas.options import ReductionSettings
from meshwright.data_parallel.replicas.slots import BucketLayout, Reduction


def build_reductions(
    layouts: Sequence[BucketLayout],
    parameters: Sequence[torch.nn.Parameter],
    settings: ReductionSettings,
    communicator: Communicator,
    hook: RegisteredHook | None,
) -> tuple[Reduction, ...]:
    """Build the reduction of each layout, whose slots count ``parameters``."""
    built: list[Reduction] = []
    alone: list[InPlaceGradient] = []
    zeros = settings.zeros_for_unused
    for layout in layouts:
        members = [parameters[slot.index] for slot in layout.slots]
        if layout.is_sparse:
            built.append(SparseGradient(layout, members[0], zeros_for_unused=zeros, hook=hook))
            continue
        if layout.is_alone:
            alone.append(InPlaceGradient(layout, members[0], communicator.empty_shared))
            built.append(alone[-1])
            continue
        is_view = settings.is_gradient_view and all(
            parameter.dtype == layout.dtype
            and (getattr(parameter, "grad_dtype", None) or layout.dtype) == layout.dtype
            for parameter in members
        )
        built.append(
            Bucket(
                layout,
                members,
                communicator.empty_shared(layout.numel, layout.dtype),
                is_gradient_view=is_view,
                riders=alone if layout is layouts[-1] else (),
                zeros_for_unused=zeros,
                hook=hook,
                is_last=layout is layouts[-1],
            )
        )
    return tuple(built)
