"""Schedules as CSV."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from support.internals.schedule import BUILDERS, build, dump_csv, load_csv, lower, parse_csv, to_csv


@pytest.mark.parametrize("name", BUILDERS)
def test_a_file_is_read_back(name: str, tmp_path: Path) -> None:
    for schedule in (build(name, 2, 4), lower(build(name, 2, 4))):
        dump_csv(schedule, tmp_path / "schedule.csv")
        assert load_csv(tmp_path / "schedule.csv") == schedule
        file = io.StringIO()
        dump_csv(schedule, file)
        file.seek(0)
        assert load_csv(file) == schedule


def test_files_of_torch_are_read() -> None:
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
    schedule = parse_csv(text)
    assert schedule.microbatches == 2
    assert schedule.stage_ranks == (0, 1)
    assert schedule.edges == ((0, 1),)
    assert schedule.rows[0][2] is None
    assert [str(a) for a in schedule.actions(1)] == ["1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected one row a rank"),
        ("0F0,bad\n", "CSV, row 1, column 2: Invalid action string: 'bad'"),
        ("# meshwright schedule 9: x\n0F0\n", "expected '# meshwright schedule 1"),
        (
            "# meshwright schedule 1: name=a microbatches=1 stage_ranks=0 edges=\n0F\n",
            "CSV, row 2, column 1",
        ),
        (
            "# meshwright schedule 1: name=a microbatches=1 stage_ranks=0,,1 edges=\n0F0\n",
            "expected numbers",
        ),
        (
            "# meshwright schedule 1: name=a microbatches=1 stage_ranks=0 edges=0-1-2\n0F0\n",
            "expected edges such as",
        ),
        ('"0F0\n', "not a CSV file"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_csv(text)


def test_a_stage_on_two_ranks_or_on_none() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on rank 0 and, by 0B0, on rank 1"):
        parse_csv("0F0\n0B0\n")
    with pytest.raises(ScheduleError, match=r"no actions of stages \[0\]"):
        parse_csv("1F0\n")


@given(st.text(alphabet='0123FBIWSEND_,\n"()#; =', max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = parse_csv(text)
    except (ValueError, ScheduleError):
        return
    assert parse_csv(to_csv(schedule)) == schedule
