"""Faults planted on every rank, each of which a test has to see."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from matrix.cells import Cell
from matrix.training import check
from meshwright import comm
from meshwright.testing import Ranks

__all__ = ["Mutant", "Patch", "changed", "here", "parameters", "said_of", "trains"]

Patch = pytest.MonkeyPatch


def here(size: int, body: Callable[..., Any], *given: Any, **_: Any) -> list[Any]:
    """Run the body of a test on the ranks that there are, instead of new ones."""
    assert comm.communicator().size == size
    return [body(*given)]


def trains(ranks: Ranks, axes: str, **more: Any) -> None:
    """A cell of the matrix."""
    check(ranks, [Cell(axes=axes, **{"model": "mixture", **more})], 60)


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Plant ``change``, which gets the real function and what that is called with."""
    real = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        return change(real, *given, **options)

    return lambda patch: patch.setattr(owner, name, call)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    plant: Callable[[Patch], None]
    seen_by: Callable[[Any], None]
    """A test, which gets the fixture ``ranks``."""
    sees: str = " are not close"
    """A piece of what it says."""
    size: int = 2


def said_of(mutant: Mutant) -> str:
    """What the test says with the fault, on this rank; without it, it has to pass."""
    mutant.seen_by(here)
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        try:
            mutant.seen_by(here)
        except (Exception, pytest.fail.Exception):
            return traceback.format_exc()
    return "nothing"


def parameters(mutants: dict[str, Mutant], quick: tuple[str, ...]) -> list[Any]:
    """The names of ``mutants``, all but the ``quick`` ones slow."""
    assert {*quick} <= {*mutants}
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in mutants]
