"""Unmodified models of transformers by the plans that they carry: two steps as one process.

The table of `docs/models.md` has every folder; ``python -m parity.model_plans`` runs them.
"""

from __future__ import annotations

import pytest

from meshwright.testing import Ranks

pytest.importorskip("transformers")
from parity.model_plans import PAGE, found, outcomes_of, results, table
from support.model_plans import CLOSE, LOOSE, folders, import_classes, trained

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TWO = ("llama", "mixtral")
TEN = (
    *("aria", "beam", "deepseek_v3", "flex_olmo", "gemma3", "gemma3n", "glm4", "granite_swa"),
    *("longcat_flash", "qwen3"),
)
"""Nearly all words that folders use, between them."""


def test_the_page_shows_what_was_found() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text(encoding="utf-8"), table()
    assert {*results("tensor"), *results("pipeline")} <= {*folders()}


def check(ranks: Ranks, folder: str, axes: dict[str, int]) -> None:
    import_classes(folder)
    by = LOOSE if results("tensor").get(folder) else CLOSE
    for difference in ranks(2, trained, folder, axes, by, timeout=200):
        assert not difference


@pytest.mark.parametrize("folder", TWO)
def test_two_folders_train_as_one_process(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("folder", TEN)
def test_ten_folders_train_as_one_process(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("folder", [n for n, text in results("pipeline").items() if not text])
def test_folders_train_in_stages_by_their_plan(ranks: Ranks, folder: str) -> None:
    check(ranks, folder, {"pipeline": 2})


@pytest.mark.slow
def test_experts_are_split_by_the_plan_of_the_model(ranks: Ranks) -> None:
    check(ranks, "qwen3_moe", {"expert": 2})


@pytest.mark.slow
@pytest.mark.soak
def test_every_folder() -> None:
    """A new folder fails here until it trains, or is refused and the results say why."""
    names = folders()
    outcomes = outcomes_of(names, {"tensor": 2})
    assert [*outcomes] == names
    wrong = {name: text for name, text in outcomes.items() if not found(name, text)}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert sum(not text.startswith("refused") for text in outcomes.values()) >= 120
