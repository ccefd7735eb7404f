"""One step of a schedule on this rank.

Bottom-up:

    weight_rules  the weight half of the backward of one autograd node
    backward      the backward of a stage and microbatch, full or in halves
    losses        the loss of each microbatch
    arguments     the arguments of a forward: checked, and copied if written in place
    residency     parameters and gradients of a stage that are replicated or sharded
    ties          parameters that several stages hold
    program       a rank's row of a schedule, with all lookups done
    custom        functions of the user in place of actions
    listener      reports each action to observers and the profiler
    runtime       the interpreter of all schedules
    stepping      the base of all schedules
"""

from __future__ import annotations

__all__: list[str] = []
