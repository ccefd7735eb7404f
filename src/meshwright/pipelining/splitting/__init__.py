"""Splitting a model into stages, by tracing it.

Bottom-up:

    dropped       what a graph would drop
    split_points  the marker of a split, and other ways to place one
    placement     the stage of each operator
    measuring     the cost of operators
    stage_module  the graph of a stage
    splitting     the graphs and edges of all stages
    tracing       tracing a module into a graph
    balance       stages of equal cost
    traced_stage  a stage that checks its values against the trace
    pipe          `pipeline`
"""

from __future__ import annotations

__all__: list[str] = []
