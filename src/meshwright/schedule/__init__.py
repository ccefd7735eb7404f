"""Schedules of a pipeline: the language that runtime, simulator and report share.

From the bottom up: ``actions`` (what a rank does, and the one rule of what needs what).
"""

from meshwright.schedule.actions import Action, Operation, Schedule, dependencies

__all__ = ["Action", "Operation", "Schedule", "dependencies"]
