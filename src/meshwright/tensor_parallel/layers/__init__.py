"""Layers whose weights are sharded over ranks.

Bottom-up:

    linear     linear layers: one autograd node with its communication
    embedding  embeddings, by rows or by features
    sequence   modules on a shard of a sequence
"""

from __future__ import annotations

__all__: list[str] = []
