"""All that a training loop goes on from, saved and loaded in one call under any wrapper.

Bottom-up:

    flat_optimizers  optimizer state by parameter name, of flat parameters too
    wrapped          models and optimizers by the names of the plain model
    together         one step on all ranks, or one error on all
    generators       the state of generators of random numbers
    restoring        what a checkpoint has for what this rank holds
    loops            `save` and `load`
"""

from __future__ import annotations

__all__: list[str] = []
