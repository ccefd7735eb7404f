"""Corrections of torch's operators on DTensors, so that results equal those of one process.

Bottom-up:

    mixed_lists     operators on lists of DTensors and plain tensors together
    random_values   random values of DTensors: each rank draws the whole tensor
    derivatives     higher derivatives of redistributed DTensors
    corrected       operators whose results in torch differ from those of one process
    written_parts   writes to views of DTensors, which change the DTensor itself
"""

from __future__ import annotations

__all__: list[str] = []
