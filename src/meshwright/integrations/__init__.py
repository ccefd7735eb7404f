"""Bridges to software of others, which is loaded when it is asked for.

Bottom-up:

    trackers  metrics of a run sent to TensorBoard, Weights & Biases, MLflow, Trackio or your own
"""

from __future__ import annotations

__all__: list[str] = []
