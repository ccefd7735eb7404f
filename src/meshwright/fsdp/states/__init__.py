"""State of the class: whole parameters, and state dicts of models and optimizers.

Bottom-up:

    full_parameters         whole parameters outside of forward and backward
    state_dict_types        the kind of state dict, for a while or for good
    state_dicts             state dicts of models, of three kinds
    optimizer_exchange      parameters by names or positions, and messages about their state
    optimizer_state         optimizer state under the names of parameters
    checkpoint_functions    what torch's checkpoint functions find
    legacy_optimizer_state  the older names of optimizer state dicts
"""

from __future__ import annotations

__all__: list[str] = []
