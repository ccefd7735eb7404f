"""Traces of tensors: what each rank of a run held of every tensor, and two runs compared.

Bottom-up:

    digest   sums that do not depend on who holds which elements
    rows     what a run wrote of its tensors
    trace    a training step that writes them
    compare  the first tensor in which two runs differ
"""

from __future__ import annotations

__all__: list[str] = []
