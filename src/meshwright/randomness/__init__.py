"""Random numbers that do not depend on the layout: the same on every mesh as in one process.

Bottom-up:

    draws           random bits by position, and the step and samples that dropout draws for
    refusals        random operators that depend on the layout
    dropout         modules that draw by position
    initialization  parameters from one generator, or from one per block of rows
"""

from __future__ import annotations

from meshwright.randomness.draws import DimPart, Draws, name_seed
from meshwright.randomness.dropout import Dropout, replace_dropout
from meshwright.randomness.initialization import (
    initialize,
    initialize_by_blocks,
    module_initializer,
)
from meshwright.randomness.refusals import RandomOperators

__all__ = [
    "DimPart",
    "Draws",
    "Dropout",
    "RandomOperators",
    "initialize",
    "initialize_by_blocks",
    "module_initializer",
    "name_seed",
    "replace_dropout",
]
