"""From a model to stages, by tracing it.

Bottom-up:

    split_points  the marker of a cut, and other ways to say where to cut
    dropped       what a graph would not have
    tracing       from a module to a graph
    measuring     the cost of operators
    balance       stages of equal cost
    placement     the stage of each operator
    stage_module  the graph of a stage
    splitting     the graphs and edges of all stages
    traced_stage  a stage that runs what was traced, or refuses
    pipe          `pipeline`
"""

from __future__ import annotations

__all__: list[str] = []
