"""The full state of a training loop, saved and loaded in one call under any wrapper.

Bottom-up:

    flat_optimizers  optimizer state by parameter name, of flat parameters too
    wrapped          models and optimizers by the names of the plain model
    together         one step on all ranks, or one error on all
    generators       the state of generators of random numbers
    restoring        state of a checkpoint for this rank's tensors
    loops            `save` and `load`
"""

from __future__ import annotations

__all__: list[str] = []
