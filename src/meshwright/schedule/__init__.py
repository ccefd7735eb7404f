"""Schedules of a pipeline: the language that runtime, simulator and report share.

Bottom-up:

    actions   what a rank does, and the one rule of what needs what
    builders  schedules as functions of ranks, microbatches and chunks
    messages  what a SEND sends and a RECV receives
    ordered   proof that a lowered schedule ends on a transport that goes by order alone
    lowering  from compute actions to all that a rank does
    text      schedules as CSV, or drawn
    checks    checks of a schedule before it runs
    simulate  simulated duration and memory
    measured  order, costs and bubble of a measured timeline
"""

from meshwright.schedule.actions import Action, Operation, Schedule, dependencies

__all__ = ["Action", "Operation", "Schedule", "dependencies"]
