"""The matrix: layouts x schedules x models x ways to train, against one process in float64.

Losses, gradients, the norm of all gradients, and weights. Pairs of columns in `make test`, every
layout with every model in `make test-all` (pipelines beside other axes in `make soak PART=3`).
What is not in `REFUSALS` has to train, and what is has to be refused when it is built.
"""

from __future__ import annotations

import functools

import pytest

from matrix.cells import PAIRS_OF_AXES, REVERSED, SINGLE_AXES, THREE_AXES, Cell, full, quick
from matrix.training import check
from meshwright.testing import Ranks

COMBINED = (*PAIRS_OF_AXES, *REVERSED, *THREE_AXES)
DEAR = [axes for axes in COMBINED if "pipeline" in axes]


@functools.cache
def chosen_for(axes: str) -> list[Cell]:
    return [cell for cell in full() if cell.axes == axes]


def test_pairs(ranks: Ranks) -> None:
    check(ranks, quick(), 240)


@pytest.mark.few(0)
@pytest.mark.parametrize(
    "axes", [*SINGLE_AXES, "pipeline=4", *(axes for axes in COMBINED if axes not in DEAR)]
)
def test_every_layout_with_every_model(ranks: Ranks, axes: str) -> None:
    check(ranks, chosen_for(axes), 600)


@pytest.mark.soak
@pytest.mark.parametrize("axes", DEAR)
def test_more_layouts_with_every_model(ranks: Ranks, axes: str) -> None:
    check(ranks, chosen_for(axes), 600)
