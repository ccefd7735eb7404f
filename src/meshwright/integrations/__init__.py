"""Bridges to programs of others. Each file imports its program when it is asked for.

Bottom-up:

    torch_names  ours under the names of torch's modules
    trackers     metrics of a run sent to TensorBoard, Weights & Biases, MLflow, Trackio or your own
    ray          loops of Ray Train: metrics and checkpoints
"""

from __future__ import annotations

__all__: list[str] = []
