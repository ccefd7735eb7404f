"""Bridges to programs of others. Each file imports its program when it is asked for.

Bottom-up:

    changes       methods of others' classes that ask functions of ours
    torch_names   ours under the names of torch's modules
    trackers      metrics of a run sent to TensorBoard, Weights & Biases, MLflow, Trackio or yours
    ray           loops of Ray Train: metrics and checkpoints
    accelerate    models of ours in Accelerate
    transformers  models of ours in the Trainer of transformers
    pretrained    models of transformers from a folder, with adapters of PEFT
    lightning     strategies for Lightning Fabric
"""

from __future__ import annotations

__all__: list[str] = []
