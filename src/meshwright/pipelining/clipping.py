"""The norm of all gradients of a model that is split into stages, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.gradients import (
    SpreadGradients,
    global_norm,
    group_by_spread,
    require_finite_norm,
    scale_to_norm,
)
from meshwright.pipelining.stage import PipelineStage
from meshwright.pipelining.ties import counted


def clip_grad_norm_(
    stages: PipelineStage | Sequence[PipelineStage],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of all stages so that their joint norm is at most ``max_norm``.

    Returns the norm that one process would find, as a 0-dim tensor: over all stages on all ranks,
    over the axes on which a stage's parameters are sharded, with tied parameters counted once.
    Every rank of the pipeline calls it with all of its stages, after a step.

    Raises ``ValueError`` for a negative ``max_norm``, ``RuntimeError`` when the norm is not finite
    and ``error_if_nonfinite`` is set, naming the first rank, stage and parameter.
    """
    if max_norm < 0:
        raise ValueError(f"expected max_norm >= 0, found {max_norm}")
    listed = [stages] if isinstance(stages, PipelineStage) else list(stages)
    modules = {stage.stage_index: stage.submod for stage in listed}
    communicator = listed[0].communicator
    own = global_norm(group_by_spread(counted(modules, listed[0].ties)), norm_type)
    both = SpreadGradients(
        gradients=(own.to(communicator.device).reshape(1),),
        communicators=(communicator,),
        dtype=own.dtype,
    )
    norm = global_norm([both], norm_type)
    named = [
        (f"stage {index}: {name}", parameter)
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
    ]
    if error_if_nonfinite:
        require_finite_norm(norm, norm_type, named, communicator)
    spread = group_by_spread(parameter for _, parameter in named)
    scale_to_norm([gradient for group in spread for gradient in group.gradients], norm, max_norm)
    return norm
