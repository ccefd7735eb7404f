"""Splitting a model into stages, by tracing it.

Bottom-up:

    dropped       what a graph would drop
    split_points  the marker of a split, and other ways to place one
    placement     the stage of each operator
    splitting     the graphs and edges of all stages
    balance       the cost of operators, and stages of equal cost
    pipe          `pipeline`: traces a module, splits the graph, and makes stages that check
                  their values against the trace
"""

from __future__ import annotations

__all__: list[str] = []
