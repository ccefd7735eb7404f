"""What happens to gradients over all axes: the loss they are of, their norm, clipping, the stop.

Bottom-up: `loss` (a mean or (sum, count), over microbatches and ranks), `finite` (all ranks skip
or stop together), `norm` (one norm over all axes, and clipping).
"""

from __future__ import annotations

from meshwright.gradients.finite import (
    LossScale,
    NonFiniteValues,
    agree_on_non_finite,
    non_finite_error,
    non_finite_gradients,
)
from meshwright.gradients.loss import (
    LocalLoss,
    LossWindow,
    apply_loss,
    call_module,
    cut_batch,
    leaves_of,
    read_loss,
)
from meshwright.gradients.norm import (
    SpreadGradients,
    clip_grad_norm_,
    global_norm,
    group_by_spread,
    require_finite_norm,
    scale_to_norm,
)

__all__ = [
    "LocalLoss",
    "LossScale",
    "LossWindow",
    "NonFiniteValues",
    "SpreadGradients",
    "agree_on_non_finite",
    "apply_loss",
    "call_module",
    "clip_grad_norm_",
    "cut_batch",
    "global_norm",
    "group_by_spread",
    "leaves_of",
    "non_finite_error",
    "non_finite_gradients",
    "read_loss",
    "require_finite_norm",
    "scale_to_norm",
]
