"""Turns a plan and a model into a training step.

Bottom-up:

    example_run       a run of a copy of the model on its example
    description       descriptions of layouts, in words and numbers
    data_layout       the ranks along axes, and those that read different data
    tensor_axis       layers that are sharded over axis tensor, and their check
    checks            contradictions of a plan and a model
    laying_out        the acts: values, dropout, layers, data axes and graphs of a module
    given_parameters  the user's parameters before the layout, and their optimizer
    trainable         a model that has been laid out, and its step
    pipelines         models whose stages lie on different ranks
    assembly          `parallelize`: the only file that knows all strategies
"""

from __future__ import annotations

from meshwright.composition.assembly import check_model, parallelize
from meshwright.composition.trainable import EvalResult, Loss, StepResult, Trainable

__all__ = ["EvalResult", "Loss", "StepResult", "Trainable", "check_model", "parallelize"]
