"""Parameters of the class as they look from outside: one flat shard, or the originals.

Bottom-up:

    tensor_axes        parameters that tensor parallelism has cut before
    pieces             this rank's pieces of parameters
    waiting_gradients  gradients of passes without a reduction
    direct_gradients   gradients that nothing would reduce: refused
    original_exposure  the original parameters, each with a piece
    exposure           one flat shard, or the originals
    sharded_axes       gradients by the axes that they lie spread over
"""

from __future__ import annotations

__all__: list[str] = []
