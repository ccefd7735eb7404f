"""Schedules of a pipeline: the language that runtime, simulator and report share.

Bottom-up:

    actions   actions of a rank, and the one rule of their dependencies
    builders  schedules as functions of ranks, microbatches and chunks
    messages  the messages of a SEND and a RECV
    lowering  adds transfers, gathers and reductions to compute actions
    text      schedules as CSV, or drawn
    checks    checks of a schedule before it runs
    simulate  simulated duration and memory
    measured  order, costs and bubble of a measured timeline
"""

from meshwright.schedule.actions import Action, Operation, Schedule, dependencies

__all__ = ["Action", "Operation", "Schedule", "dependencies"]
