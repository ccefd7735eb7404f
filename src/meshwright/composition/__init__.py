"""A plan and a model become a training step.

Bottom-up: `named_optimizer` (optimizer state by parameter name), `description` (what a layout does,
in words), `peers` (with whom a rank does what), `data_layout` (the data axes), `trainable` (the
step), `tensor_rules` (which layers are cut over axis tensor), `tensor_check` (whether the model is
still the same then), `tensor_twin` and `stages` (where a model is cut for a pipeline),
`pipelined_layout` and `pipelined` (its stages on different ranks, and their step), `compiling`
(what of a layout is compiled), `checks` (what a plan and a model contradict), `assembly`
(`parallelize`: the only file that knows all strategies).
"""

from __future__ import annotations

from meshwright.composition.assembly import check_model, parallelize
from meshwright.composition.trainable import EvalResult, Loss, StepResult, Trainable

__all__ = ["EvalResult", "Loss", "StepResult", "Trainable", "check_model", "parallelize"]
