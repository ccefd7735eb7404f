"""The endurance programs, short: what grows by steps is seen in few of them, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.testing import ranks
from soak import run
from soak.busy_train import unexpected
from soak.crowd import three_steps
from soak.footprint import Footprint, growth
from soak.idle import check as check_idle
from soak.steps import LAYOUTS, measured_run
from soak.table import Table
from support.recipes.runs import write_text


def footprint_of(memory: int, descriptors: int = 10, threads: int = 4) -> Footprint:
    return Footprint(memory=memory, descriptors=descriptors, threads=threads, mappings=500)


def test_growth_counts_from_the_first_fifth_and_forgives_one_thread() -> None:
    warming = [footprint_of(10 * n) for n in range(2)]
    steady = [footprint_of(100, 10 + n % 2, 4 + n % 2) for n in range(8)]
    assert set(growth([*warming, *steady]).values()) == {0.0}
    grown = growth([*warming, *steady, footprint_of(110, 12, 8)])
    assert grown["memory"] == pytest.approx(0.1)
    assert grown["descriptors"] == pytest.approx(0.1)
    assert grown["threads"] == pytest.approx(0.75)


def test_a_table_ends_with_1_when_a_row_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    def raises() -> tuple[str, str]:
        raise RuntimeError("rank 1 was lost")

    table = Table("title", ["column"])
    assert table.end() == 1, "nothing was shown"
    table.row("good", lambda: ("12 MB", ""))
    assert table.end() == 0
    table.row("grows", lambda: ("14 MB", "memory grew by 7 %"))
    table.row("raises", raises)
    assert table.end() == 1
    text = capsys.readouterr().out
    assert "MISSED: memory grew by 7 %" in text
    assert "MISSED: RuntimeError: rank 1 was lost" in text
    assert "1 of 3 rows held; missed: grows, raises" in text


def test_a_part_says_which_programs_were_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "one that holds": ("-c", "print('5 of 5 rows held')"),
        "one that does not": ("-c", "import soak.table; raise SystemExit('rank 1 grew')"),
    }
    monkeypatch.setitem(run.PARTS, "1", programs)
    assert run.main(["1"]) == 1
    text = capsys.readouterr().out.partition("in short")[2]
    assert "== held in " in text
    assert "s: one that holds\n   5 of 5 rows held" in text
    assert "s: one that does not\n   rank 1 grew" in text
    assert "1 of 2 programs held" in text
    assert run.main(["2"]) == 2
    assert "make soak PART=1" in capsys.readouterr().out


def test_what_a_run_says_of_trouble_is_found() -> None:
    quiet = "step 10/300  loss 3.4  900 tokens/s\nsaved step 10"
    assert unexpected(quiet, "") == []
    assert unexpected(quiet + "\nrank 3 has not issued it: slow", "x: UserWarning") == [
        "x: UserWarning",
        "rank 3 has not issued it: slow",
    ]


@pytest.mark.slow
def test_steps_leave_no_descriptors_or_threads_behind(tmp_path: Path) -> None:
    write_text(tmp_path)
    # The first saves map the memory of their copies, before what is compared.
    how = *LAYOUTS["shard"], "run.save_every=4", "run.validate_every=20"
    for measured in ranks(2, measured_run, tmp_path, 40, *how, timeout=200)[0]:
        assert len(measured) >= 20
        grown = growth(measured)
        assert grown["descriptors"] == grown["threads"] == 0.0, (measured[4], measured[-1])
        assert measured[-1].mappings <= measured[4].mappings + 8


def test_what_idles_goes_on_to_the_same_numbers() -> None:
    shown, problem = check_idle("shm", 0.5)
    assert (shown, problem) == ("21 steps before and after", "")


@pytest.mark.slow
def test_more_ranks_than_cores(tmp_path: Path) -> None:
    results = ranks(12, three_steps, tmp_path, "shm", timeout=300, grace=20, connected=False)
    assert [words for words, _ in results] == [[]] * 12
