"""The cells of the matrix with axis context: fourteen in `make test`, all in `make test-all`."""

from __future__ import annotations

import pytest

from matrix.cells import (
    CONTEXT_AXES,
    EIGHT_WITH_CONTEXT,
    over_context,
    over_experts,
    quick_over_context,
)
from matrix.training import check
from meshwright.testing import Ranks


def test_there_are_enough() -> None:
    assert len(quick_over_context()) == 14
    assert len({*over_context()}) + len({*over_experts()}) >= 160


def test_some(ranks: Ranks) -> None:
    check(ranks, quick_over_context(), 240)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [*CONTEXT_AXES, *EIGHT_WITH_CONTEXT])
def test_every_layout_with_context(ranks: Ranks, axes: str) -> None:
    check(ranks, [cell for cell in over_context() if cell.axes == axes], 600)
