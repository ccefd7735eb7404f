"""One step of a schedule on this rank.

Bottom-up:

    weight_rules    the weight half of one autograd node
    backward        the backward of a stage and microbatch
    split_backward  the two halves of a backward, and what lies between
    written_inputs  stages that write to what they have received
    losses          the loss of each microbatch
    arguments       the arguments of a forward, compared with those before
    residency       parameters and gradients of a stage that are copied or spread
    ties            parameters that several stages hold
    custom          functions of the user in place of actions
    listener        who is told of each action
    program         a rank's row of a schedule, with all looked up
    runtime         the interpreter of all schedules
    stepping        the base of all schedules
"""

from __future__ import annotations

__all__: list[str] = []
