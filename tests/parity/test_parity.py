"""The pages of parity say what is the same as torch's, and nothing is absent without a reason."""

from __future__ import annotations

import pytest
import torch

from parity.names import SUBJECTS, Subject, rows
from parity.table import PAGE, SUMMARY, counts, note_of, render

released = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13"
)


@released
def test_the_page_is_what_the_modules_say_and_names_a_test_for_all_that_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "PYTHONPATH=tests python -m parity.table"
    assert "| `` |" not in page


def test_the_summary_has_the_counts_of_the_page() -> None:
    assert counts(PAGE.read_text(encoding="utf-8")) in SUMMARY.read_text(encoding="utf-8")


@released
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.title)
def test_what_is_not_the_same_has_a_reason(subject: Subject) -> None:
    assert [
        row.name for row in rows(subject) if (row.differs or not row.found) and not note_of(row)
    ] == []
