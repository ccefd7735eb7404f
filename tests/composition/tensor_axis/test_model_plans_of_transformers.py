"""Unmodified models of transformers by the plans that they carry: two steps as one process.

The table of `docs/models.md` has every folder; ``python -m parity.model_plans`` runs them.
"""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks

pytest.importorskip("transformers")
from parity.model_plans import PAGE, REFUSED, STAGED, TOLERANCE, found, outcomes_of, table
from support.model_plans import folders, import_classes, trained

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TWO = ("llama", "mixtral")
TEN = (
    *("deepseek_v3", "qwen3", "phi3", "gemma3", "glm4", "granite_swa", "inkling", "aria"),
    *("longcat_flash", "nemotron_h"),
)
"""All words that folders use, between them."""


def test_the_page_shows_what_was_found() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text(encoding="utf-8"), table()
    assert {*REFUSED, *TOLERANCE, *STAGED} <= {*folders()}


def check(ranks: Ranks, folder: str, axes: dict[str, int]) -> None:
    import_classes(folder)
    for difference in ranks(2, trained, folder, axes, TOLERANCE.get(folder, 1e-9), timeout=200):
        assert not difference


@pytest.mark.parametrize("folder", TWO)
def test_two_folders_train_as_one_process(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("folder", TEN)
def test_ten_folders_train_as_one_process(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("folder", STAGED)
def test_folders_train_in_stages_by_their_plan(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"pipeline": 2})


@pytest.mark.slow
def test_experts_are_split_by_the_plan_of_the_model(ranks: Ranks) -> None:
    check(ranks, "qwen3_moe", {"expert": 2})


@pytest.mark.slow
@pytest.mark.soak
def test_every_folder() -> None:
    """A new folder fails here until it trains, or is refused and `REFUSED` has why."""
    names = folders()
    outcomes = outcomes_of(names, {"tensor": 2})
    assert [*outcomes] == names
    wrong = {name: text for name, text in outcomes.items() if not found(name, text)}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert len(names) - len(REFUSED) >= 120
