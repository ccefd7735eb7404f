"""The full state of a training loop, saved and loaded in one call under any wrapper.

Bottom-up:

    wrapped          state of models, by the names of the plain model
    named_optimizer  state of optimizers by these names, also for flat parameters
    restoring        loads the state of a checkpoint into this rank's tensors
    loops            `save` and `load`
"""

from __future__ import annotations

__all__: list[str] = []
