"""Models whose stages lie on different ranks.

Bottom-up:

    stages             a model split into stages
    own_tensors        stages that share the model's parameters and buffers
    tied_values        tied parameters between steps
    loss_sources       parameters that a loss may read
    cut_guard          changes of a model that its stages do not follow
    pipelined_layout   the stages of one rank as one layout
    pipelined          the training step of a pipeline
    pipeline_assembly  assembly of a plan with axis pipeline
"""

from __future__ import annotations

__all__: list[str] = []
