"""Views of a unit's parameters for modules and optimizers: one flat shard, or the originals.

Bottom-up:

    exposure           one flat shard, or the originals
    tensor_axes        parameters that tensor parallelism has sharded before, gradients by axes
    original_exposure  the original parameters, each with its local piece
"""

from __future__ import annotations

__all__: list[str] = []
