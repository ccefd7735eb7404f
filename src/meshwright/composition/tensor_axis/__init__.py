"""Layers that are sharded over axis tensor: their styles, and the check of the result.

Bottom-up:

    tensor_rules  styles by name, and sets of them for known models
    tensor_check  compares the sharded model with the full one, and records its traffic
    tensor_twin   traced stages with sharded layers
"""

from __future__ import annotations

__all__: list[str] = []
