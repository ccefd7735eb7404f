"""The cells of the matrix with axis expert: a few in `make test`, pairs in `make test-all`."""

from __future__ import annotations

import pytest

from matrix.cells import EXPERT_AXES, THREE_WITH_EXPERTS, Cell, over_experts
from matrix.training import check
from meshwright.testing import Ranks

QUICK = (
    Cell(axes="expert=2", model="mixture", loss="counted", is_clipped=True, optimizer="adamw"),
    Cell(axes="expert=2", model="mixture", accumulate=2, option="recompute"),
    Cell(axes="expert=2", model="mixture", precision="bfloat16", option="other units"),
    Cell(axes="shard=2,expert=2", model="mixture", loss="counted", is_clipped=True),
    Cell(axes="pipeline=2,expert=2", model="mixture", schedule="zbv", is_clipped=True),
)


def test_some(ranks: Ranks) -> None:
    check(ranks, [*QUICK], 240)


@pytest.mark.few(0)
@pytest.mark.parametrize("axes", [*EXPERT_AXES, *THREE_WITH_EXPERTS])
def test_every_layout_with_experts(ranks: Ranks, axes: str) -> None:
    check(ranks, [cell for cell in over_experts() if cell.axes == axes], 600)
