"""Parameters that several stages hold: copies of one parameter, whose gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tie"]


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter of the model that several stages hold."""

    owner: int
    """The stage whose copy gives the value, and counts."""
    names: tuple[tuple[int, str], ...]
    """(stage, name in that stage) of every holder, by stage."""
