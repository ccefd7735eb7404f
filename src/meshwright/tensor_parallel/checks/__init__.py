"""Checks of what the ranks of one axis hold and do.

Bottom-up:

    following  layouts, followed through the first forward
    equality   what each rank holds whole is equal
    passes     whether ranks do the same, with the same values
"""

from __future__ import annotations

__all__: list[str] = []
