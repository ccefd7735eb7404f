"""Every strategy against one process: models, precisions and ways to accumulate.

Pairs of all of them, optimizers included, in `make test`. In `make test-all` the whole product on 2
ranks, and on 4 ranks the pairs and, in double precision, every row whose strategy has two axes.
"""

from __future__ import annotations

import itertools

import pytest

from meshwright.testing import Ranks
from support.data_parallel.table_models import ROWS
from support.data_parallel.table_strategies import STRATEGIES, Request
from support.data_parallel.table_training import (
    ACCUMULATIONS,
    OPTIMIZERS,
    PRECISIONS,
    Cell,
    built,
    train,
)
from support.pairwise import Row, pairs_of, pairwise

COLUMNS = (tuple(STRATEGIES), tuple(ROWS), PRECISIONS, tuple(ACCUMULATIONS))


def is_legal(row: Row) -> bool:
    strategy, model, precision, _ = map(str, row)
    if STRATEGIES[strategy].is_flat and ROWS[model].refused_flat:
        return False
    if precision != "narrow":
        return True
    # torch computes no BatchNorm whose weight is narrower than its running statistics.
    is_refused_by_torch = model == "batch norm" and STRATEGIES[strategy].casts_norms
    return STRATEGIES[strategy].has_policy and not is_refused_by_torch


def cells(rows: list[Row]) -> list[Cell]:
    """Cells with the same reference stand together."""
    made = [
        Cell(strategy=str(s), model=str(m), precision=str(p), accumulation=str(a))
        for s, m, p, a in rows
    ]
    return sorted(made, key=lambda cell: (cell.model, cell.precision, cell.accumulation))


def body(chosen: list[tuple[Cell, str]]) -> list[str]:
    found: list[str] = []
    for cell, kind in chosen:
        try:
            wrong = train(cell, kind)
        except Exception as error:
            error.add_note(f"in {cell} / {kind}")
            raise
        if wrong:
            found.append(f"{cell} / {kind}: {wrong[0]} ({len(wrong)} in all)")
    return found


def check(ranks: Ranks, size: int, chosen: list[Cell], timeout: float) -> None:
    """Train each with every optimizer."""
    check_trained(ranks, size, list(itertools.product(chosen, OPTIMIZERS)), timeout)


def check_trained(ranks: Ranks, size: int, chosen: list[tuple[Cell, str]], timeout: float) -> None:
    for rank, found in enumerate(ranks(size, body, chosen, timeout=timeout)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


def test_pairwise_rows_hold_every_pair() -> None:
    columns = (("a", "b", "c"), (1, 2), ("x", "y"))
    rows = pairwise(columns, lambda row: row[:2] != ("c", 2))
    wanted = {
        pair for row in itertools.product(*columns) if row[:2] != ("c", 2) for pair in pairs_of(row)
    }
    assert set().union(*map(pairs_of, rows)) == wanted
    assert len(rows) <= 6
    assert rows == pairwise(columns, lambda row: row[:2] != ("c", 2))


@pytest.mark.slow
def test_pairs(ranks: Ranks) -> None:
    rows = pairwise((*COLUMNS, tuple(OPTIMIZERS)), lambda row: is_legal(row[:-1]))
    by_optimizer = ((kind, [row[:-1] for row in rows if row[-1] == kind]) for kind in OPTIMIZERS)
    chosen = [(cell, kind) for kind, own in by_optimizer for cell in cells(own)]
    check_trained(ranks, 2, chosen, 300)


def product(model: str) -> list[Cell]:
    return cells([row for row in itertools.product(*COLUMNS) if row[1] == model and is_legal(row)])


@pytest.mark.soak
@pytest.mark.parametrize("model", ROWS)
def test_whole_product(ranks: Ranks, model: str) -> None:
    check(ranks, 2, product(model), 600)


@pytest.mark.soak
def test_pairs_on_four_ranks(ranks: Ranks) -> None:
    check(ranks, 4, cells(pairwise(COLUMNS, is_legal)), 600)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("model", ROWS)
def test_two_axes_of_two_ranks(ranks: Ranks, model: str) -> None:
    chosen = [cell for cell in product(model) if "hybrid" in cell.strategy.lower()]
    check(ranks, 4, [cell for cell in chosen if cell.precision == "double"], 600)


def body_refused(names: list[str]) -> None:
    for name in names:
        row = ROWS[name]
        model = built(row, "double")
        request = Request(model=model, units=row.units(model), is_narrow=False)
        with pytest.raises(ValueError, match=row.refused_flat):
            STRATEGIES["FULL_SHARD flat"].lay_out(request)


def test_what_one_flat_parameter_cannot_hold_is_refused(ranks: Ranks) -> None:
    ranks(2, body_refused, [name for name, row in ROWS.items() if row.refused_flat])
