"""Traces of tensors (digests of each rank's part of every tensor), and comparison of two runs.

Bottom-up:

    rows     the rows of a trace, and the files they are in
    trace    a training step that writes them
    compare  the first tensor in which two runs differ
"""

from __future__ import annotations

__all__: list[str] = []
