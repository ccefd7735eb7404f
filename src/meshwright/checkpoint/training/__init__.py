"""The full state of a training loop, saved and loaded in one call under any wrapper.

Bottom-up:

    wrapped          models by the names of the plain model
    named_optimizer  optimizers by these names, of flat parameters too
    restoring        state of a checkpoint for this rank's tensors
    loops            `save` and `load`
"""

from __future__ import annotations

__all__: list[str] = []
