"""One step of a schedule on this rank.

Bottom-up:

    weight_rules  the weight half of one autograd node
    backward      the backward of a stage and microbatch, whole or in halves
    losses        the loss of each microbatch
    arguments     the arguments of a forward, compared with those before, copied if written to
    residency     parameters and gradients of a stage that are copied or spread
    ties          parameters that several stages hold
    program       a rank's row of a schedule, with all looked up
    custom        functions of the user in place of actions
    listener      who is told of each action
    runtime       the interpreter of all schedules
    stepping      the base of all schedules
"""

from __future__ import annotations

__all__: list[str] = []
