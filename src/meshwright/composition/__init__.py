"""A plan and a model become a training step.

Bottom-up: `named_optimizer` (optimizer state by parameter name), `description` (what a layout does,
in words), `data_layout` (the data axes), `trainable` (the step), `stages` (where a model is cut),
`pipelined_layout` and `pipelined` (its stages on different ranks, and their step), `assembly`
(`parallelize`: the only file that knows all strategies).
"""

from __future__ import annotations

from meshwright.composition.assembly import check_model, parallelize
from meshwright.composition.trainable import EvalResult, Loss, StepResult, Trainable

__all__ = ["EvalResult", "Loss", "StepResult", "Trainable", "check_model", "parallelize"]
