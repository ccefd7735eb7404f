"""Bridges to other libraries. Each file imports its library only when it is used.

Bottom-up:

    torch_names   Meshwright under the names of torch's modules
    trackers      metrics for TensorBoard, Weights & Biases, MLflow, Trackio or your own tracker
    ray           loops of Ray Train: metrics and checkpoints
    accelerate    Meshwright's models in Accelerate
    transformers  Meshwright's models in the Trainer of transformers
    pretrained    models of transformers from a folder, with adapters of PEFT
    lightning     strategies for Lightning Fabric
"""

from __future__ import annotations

__all__: list[str] = []
