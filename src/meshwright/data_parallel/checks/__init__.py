"""Checks that all ranks of a model have equal state and run the same passes.

Bottom-up:

    starting_state  the state before the first step: compared, or broadcast
    forward_writes  parameters that a forward pass writes in place
    step_watch      the steps of optimizers
    alignment       notes sent behind the gradients: their pass, digests of weights, other flags
"""

from __future__ import annotations

__all__: list[str] = []
