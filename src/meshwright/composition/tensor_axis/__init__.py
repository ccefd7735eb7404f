"""Layers that are cut over axis tensor: which, how, and whether the model stays the same.

Bottom-up:

    tensor_rules  styles by name, and sets of them for known models
    tensor_check  whether the model that was cut computes the same, and what it sends
    tensor_twin   traced stages whose layers are cut
"""

from __future__ import annotations

__all__: list[str] = []
