"""Checks that the ranks of one model hold and do the same.

Bottom-up:

    starting_state  the state before the first step: compared, or broadcast
    forward_writes  parameters that a forward pass writes in place
    step_watch      the steps of optimizers
    same_weights    digests of copies of the weights, compared in some passes
    alignment       numbers behind the gradients: of which pass they are, and other notes
    ledger          the passes of a root and the order of its units, compared
"""

from __future__ import annotations

__all__: list[str] = []
