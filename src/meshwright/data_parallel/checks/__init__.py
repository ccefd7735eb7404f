"""Checks that all ranks of a model have equal state and run the same passes.

Bottom-up:

    starting_state  the state before the first step: compared, or broadcast
    forward_writes  parameters that a forward pass writes in place
    step_watch      the steps of optimizers
    same_weights    digests of copies of the weights, compared in some passes
    alignment       notes sent behind the gradients: which pass they belong to, and other flags
    ledger          the passes of a root and the order of its units, compared
"""

from __future__ import annotations

__all__: list[str] = []
