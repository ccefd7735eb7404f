"""From a model to stages, by tracing it.

Bottom-up:

    dropped       what a graph would not have
    split_points  the marker of a cut, and other ways to say where to cut
    placement     the stage of each operator
    measuring     the cost of operators
    stage_module  the graph of a stage
    splitting     the graphs and edges of all stages
    tracing       from a module to a graph
    balance       stages of equal cost
    traced_stage  a stage that runs what was traced, or refuses
    pipe          `pipeline`
"""

from __future__ import annotations

__all__: list[str] = []
