"""The checks of stages for a schedule, and of what is unusual about their modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.pipelining.stage import PipelineStage

__all__ = ["check_arguments", "is_compiled"]


def check_arguments(stages: object, microbatches: object, loss_fn: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what no schedule can be built with."""
    listed = list(stages) if isinstance(stages, Sequence) else [stages]
    wrong = [stage for stage in listed if not isinstance(stage, PipelineStage)]
    if wrong or not isinstance(stages, Sequence):
        raise TypeError(
            "expected one PipelineStage for a schedule of single stages and a list of them for "
            f"others, found {type(wrong[0] if wrong else stages).__name__}"
        )
    if not isinstance(microbatches, int) or isinstance(microbatches, bool):
        raise TypeError(f"expected n_microbatches to be an int, found {microbatches!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"expected loss_fn(output, target) or None, found {loss_fn!r}")
    indices = [stage.stage_index for stage in listed]
    if not listed or len(set(indices)) < len(indices):
        raise ValueError(f"expected different stages, one or more, found {indices}")
    ranks, count = listed[0].group_size, listed[0].num_stages
    if count % ranks:
        raise ValueError(
            f"expected as many stages on each rank, found {count} stages for {ranks} ranks"
        )


def is_compiled(module: nn.Module) -> bool:
    """Check that ``module`` or a part of it was compiled, without an import of torch's class."""
    return any(
        type(part).__name__ == "OptimizedModule"
        or part._compiled_call_impl is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in module.modules()
    )
