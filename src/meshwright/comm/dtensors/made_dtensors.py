"""The DTensors that tensor parallelism has made of plain parameters.

A tied parameter becomes one DTensor. Whoever still holds the plain one finds on it what it became.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import AnyPlacement

_BECAME = "_meshwright_became"


@dataclass(frozen=True, slots=True, eq=False)
class Became:
    """The DTensor that a plain parameter has become. A copy of the plain one has become nothing."""

    parameter: nn.Parameter
    placement: AnyPlacement
    name: str
    is_partial: bool
    """True when each rank computes a part of its gradient."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def note_became(given: nn.Parameter, became: Became) -> None:
    """Note on ``given`` what it has become."""
    vars(given)[_BECAME] = became


def what_became(given: torch.Tensor) -> Became | None:
    """Find what ``given`` has become; None for any other tensor."""
    return vars(given).get(_BECAME)


def became(tensor: torch.Tensor) -> str:
    """Find the name of the DTensor that a plain parameter has become; "" for any other tensor."""
    found = what_became(tensor)
    return "" if found is None else found.name


def check_ties(root: nn.Module) -> None:
    """Raise ValueError where a module still holds a plain parameter that is a DTensor elsewhere."""
    for path, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            became = None if parameter is None else what_became(parameter)
            if became is not None:
                raise ValueError(
                    f"{path}.{key} is tied to {became.name}, which is placed {became.placement} "
                    f"over tensor ranks, but the plan names only one of them: add a style for "
                    f"{path!r}, or untie them"
                )
