"""Checks of the values and passes of the ranks of one axis.

Bottom-up:

    following  layouts, followed through the first forward
    equality   replicated values are equal on all ranks
    passes     ranks run the same passes, with the same values
"""

from __future__ import annotations

__all__: list[str] = []
