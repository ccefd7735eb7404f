"""The code that docs/clients.md shows, run on two ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright
from meshwright.comm import communicator
from meshwright.testing import Ranks
from support.clients import adam, llama, model, needs, rows, texts

needs("accelerate", "lightning", "peft", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SNIPPETS = {
    section.partition("\n")[0]: found[1]
    for section in PAGE.read_text().split("\n## ")
    if (found := re.search(r"```python\n(.*?)```", section, re.DOTALL))
}


def loop() -> dict[str, Any]:
    plain = model()
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    given = adam(plain.parameters())
    return {"model": plain, "optimizer": given, "batches": loader, "loss": F.mse_loss}


def trainer() -> dict[str, Any]:
    import transformers

    args = transformers.TrainingArguments(
        "trained", max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    return {"model": llama(), "args": args, "rows": texts()}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "Accelerate": loop,
    "The Trainer of transformers": trainer,
    "Lightning Fabric": lambda: {"model": llama()},
    "PEFT": lambda: {"model": llama(), "rank": communicator().rank},
}


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_snippet_runs(ranks: Ranks, title: str, tmp_path: Path) -> None:
    """Each block of docs/clients.md, with what it takes for granted."""

    def body() -> None:
        os.chdir(tmp_path)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        exec(SNIPPETS[title], {"torch": torch, "meshwright": meshwright, **GIVEN[title]()})

    ranks(2, body, timeout=300)


def test_every_snippet_is_known() -> None:
    assert SNIPPETS.keys() == GIVEN.keys()
    assert len(SNIPPETS) == PAGE.read_text().count("```python")
