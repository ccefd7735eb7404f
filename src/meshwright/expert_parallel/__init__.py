"""Expert parallelism: the experts of a layer on different ranks, and tokens that travel to them.

Bottom-up:

    exchange    rows to the ranks of their experts and back: differentiable, each way one message
    forms       which modules hold experts
    arithmetic  matrix products of experts whose weights are one tensor
    listed      `experts_of`: a list of experts as one module
    routing     what a forward leaves behind: logits of routers, tokens of each expert
    layer       the class around a module of experts
    style       `ExpertParallel`, for `parallelize_module`
    balance     losses and biases that keep experts evenly used
"""

from __future__ import annotations

from meshwright.expert_parallel.balance import (
    auxiliary_loss,
    balance_experts,
    counts_of,
    z_loss,
)
from meshwright.expert_parallel.forms import experts
from meshwright.expert_parallel.listed import experts_of
from meshwright.expert_parallel.style import ExpertParallel

__all__ = [
    "ExpertParallel",
    "auxiliary_loss",
    "balance_experts",
    "counts_of",
    "experts",
    "experts_of",
    "z_loss",
]
