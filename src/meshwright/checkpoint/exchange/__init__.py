"""Weights in other formats, and the contents of checkpoints.

Bottom-up:

    weights       the weights of a checkpoint or of a foreign file, read tensor by tensor
    hugging_face  folders of safetensors files with an index
    torch_file    one file of torch, weights only
    dcp           folders of torch's distributed checkpoint
    conversion    `export_weights` and `import_weights`
    contents      `contents` of a checkpoint, and the `differences` of two
"""

from __future__ import annotations

__all__: list[str] = []
