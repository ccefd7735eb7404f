"""State of the class: whole parameters, and state dicts of models and optimizers.

Bottom-up:

    named                 one parameter of a unit: its names, its shape, its local elements
    full_parameters       whole parameters outside of forward and backward
    state_dicts           state dicts of models, of three kinds
    optimizer_state       optimizer state under the names of parameters
    methods               the methods of the class for both
    checkpoint_functions  support of torch's checkpoint functions
"""

from __future__ import annotations

__all__: list[str] = []
