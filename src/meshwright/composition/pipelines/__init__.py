"""Models whose stages lie on different ranks.

Bottom-up:

    stages             where a model is cut, and its stages
    own_tensors        stages with the model's own parameters and buffers, and those of others
    tied_values        tied parameters between steps
    step_hooks         hooks of parameters, once a step
    loss_sources       weights that a loss may read
    taken_apart        modules that a pipeline has taken apart
    pipelined_layout   the stages of one rank as one layout
    pipelined          the training step of a pipeline
    pipeline_assembly  from a plan with axis pipeline to its stages
"""

from __future__ import annotations

__all__: list[str] = []
