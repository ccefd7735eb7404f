"""Schedules of a pipeline: the language that runtime, simulator and report share.

Bottom-up:

    actions          actions of a rank, and the one rule of their dependencies
    messages         the messages of a SEND and a RECV
    text             schedules as CSV, or drawn
    simulate         simulated duration and memory
    list_scheduling  an order for each rank, by greedy ranks
    lowering         adds transfers, gathers and reductions to compute actions
    builders         schedules as functions of ranks, microbatches and chunks
    checks           checks of a schedule before it runs
    search           a schedule for given costs and memory
    measured         order, costs and bubble of a measured timeline
"""

from meshwright.schedule.actions import Action, Operation, Schedule, dependencies
from meshwright.schedule.search import find_schedule
from meshwright.schedule.simulate import Costs

__all__ = ["Action", "Costs", "Operation", "Schedule", "dependencies", "find_schedule"]
