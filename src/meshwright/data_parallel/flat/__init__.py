"""The flat view of a model, on which optimizers run in few operations.

Bottom-up:

    flat_parameters  parameters side by side in memory, with their gradients
    optimizer        the flat view: a tensor a unit, or one for all
"""

from __future__ import annotations

__all__: list[str] = []
