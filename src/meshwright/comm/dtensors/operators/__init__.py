"""torch's operators on DTensors, so that they compute what one process does.

Bottom-up:

    mixed_lists     operators on lists of DTensors and plain tensors together
    random_values   the random values of DTensors, which each rank draws whole
    derivatives     derivatives of any order of DTensors that are moved
    corrected       operators whose results differ under torch's rules from those of one process
    written_parts   writes to parts of DTensors, which change these themselves
"""

from __future__ import annotations

__all__: list[str] = []
