"""The program of docs/context_parallel.md with packed rows and a model of Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch

from meshwright.testing import Ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

DOCS = Path(__file__).parents[2] / "docs"


def losses_of(code: str) -> list[float]:
    names: dict[str, object] = {"__name__": "page"}
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(code, "context_parallel.md", "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)
    return [each.item() for each in cast("list[torch.Tensor]", names["losses"])]


def test_the_program_of_the_page_trains_as_one_process(ranks: Ranks) -> None:
    section = (DOCS / "context_parallel.md").read_text().partition("## Packed rows")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    (expected,) = ranks(1, losses_of, code.replace("axes.context = 2\\n", ""))
    assert len(expected) > 3
    for found in ranks(2, losses_of, code):
        assert found == pytest.approx(expected, rel=1e-6)
