"""Diagnosis of a machine: what it offers to a run, what is wrong, and how to fix it.

Bottom-up:

    machine      facts about GPUs and network; tests replace it
    collectives  measurements of collectives between ranks started for this
    survey       all findings, in their order
    calibration  the rates of a machine, for the planner
    __main__     one rank of a measurement
"""

from __future__ import annotations

from meshwright.doctor.machine import Finding, report_lines
from meshwright.doctor.survey import examine, usable_cores
from meshwright.environment import memory_limit

__all__ = ["Finding", "examine", "memory_limit", "report_lines", "usable_cores"]
