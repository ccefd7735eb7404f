"""Gradients over all axes: loss, norm, clipping, and the stop at non-finite values.

Bottom-up:

    bits        digests, zeroing and steps that a device decides on without a host sync
    closeness   checks that tensors are equal on all ranks up to rounding
    loss        a mean, or (sum, count), over microbatches and ranks
    finite      all ranks skip or stop together
    optimizers  refusals of optimizers that are wrong on parts of parameters
    optimizer_list  several optimizers as one
    norm        one norm over all axes, and clipping
"""

from __future__ import annotations

from meshwright.gradients.bits import digest_of_all, digests_of, step_if, zero_unless
from meshwright.gradients.closeness import (
    Held,
    beyond_rounding,
    beyond_rounding_first,
    is_due,
    kind_of,
    require_close,
    rounding_floor,
)
from meshwright.gradients.finite import (
    UNTOUCHED,
    UNWRITTEN,
    ZEROED,
    LossScale,
    NonFiniteValues,
    agree_on_non_finite,
    non_finite_error,
    non_finite_gradients,
)
from meshwright.gradients.loss import (
    IGNORED,
    Factor,
    LocalLoss,
    LossWindow,
    apply_loss,
    call_module,
    cut_batch,
    leaves_of,
    multiply_,
    read_loss,
    terms_of,
    times,
)
from meshwright.gradients.norm import (
    SpreadGradients,
    clip_grad_norm_,
    global_norm,
    group_by_spread,
    require_finite_norm,
    scale_to_norm,
)
from meshwright.gradients.optimizers import (
    check_optimizer,
    declare_element_wise,
    look_at_optimizers,
    mark_mean,
    mark_stage,
    mean_axes,
    refuse_stages,
    warn_of_zeros,
    warn_without_gradients,
)

__all__ = [
    "IGNORED",
    "UNTOUCHED",
    "UNWRITTEN",
    "ZEROED",
    "Factor",
    "Held",
    "LocalLoss",
    "LossScale",
    "LossWindow",
    "NonFiniteValues",
    "SpreadGradients",
    "agree_on_non_finite",
    "apply_loss",
    "beyond_rounding",
    "beyond_rounding_first",
    "call_module",
    "check_optimizer",
    "clip_grad_norm_",
    "cut_batch",
    "declare_element_wise",
    "digest_of_all",
    "digests_of",
    "global_norm",
    "group_by_spread",
    "is_due",
    "kind_of",
    "leaves_of",
    "look_at_optimizers",
    "mark_mean",
    "mark_stage",
    "mean_axes",
    "multiply_",
    "non_finite_error",
    "non_finite_gradients",
    "read_loss",
    "refuse_stages",
    "require_close",
    "require_finite_norm",
    "rounding_floor",
    "scale_to_norm",
    "step_if",
    "terms_of",
    "times",
    "warn_of_zeros",
    "warn_without_gradients",
    "zero_unless",
]
