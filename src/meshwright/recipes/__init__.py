"""The main job: a byte-level language model trained on text files."""

from __future__ import annotations

__all__: list[str] = []
