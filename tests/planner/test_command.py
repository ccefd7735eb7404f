"""``meshwright plan``: answers, files, exit statuses and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import Plan
from meshwright.cli import main

SIZES = ("layers = 16", "hidden = 2048", "heads = 16", "ffn = 8192", "vocab = 32000", "seq = 2048")
MODEL = "\n".join(SIZES)


@pytest.fixture(autouse=True)
def no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.toml").write_text(MODEL)
    return str(tmp_path / "model.toml")


def test_the_best_plan_is_printed_and_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    words = ["plan", model, "--gpus", "8", "--batch", "64", "--write", str(file)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert Plan.from_file(file).axes.world_size == 8
    assert Plan.from_toml(printed) == Plan.from_file(file)
    for part in ("layouts considered", "tokens/s", "# fastest for its memory", "# neighbors"):
        assert part in printed


def test_whether_it_fits_is_the_exit_status(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--gpus", "8", "--fit-only"]) == 0
    assert "fits: " in capsys.readouterr().out
    large = tmp_path / "large.toml"
    large.write_text(
        MODEL.replace("layers = 16", "layers = 900").replace("hidden = 2048", "hidden = 16384")
    )
    assert main(["plan", str(large), "--gpus", "1", "--fit-only"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_a_function_of_ones_own_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "planner.test_traced:small", "--gpus", "2", "--batch", "8", "--seq", "64"]
    assert main(words) == 0
    assert Plan.from_toml(capsys.readouterr().out).axes.world_size == 2


def test_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "list"]) == 0
    assert "h100" in capsys.readouterr().out.split()


def test_a_file_of_runs_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.json").write_text(json.dumps({"rows": []}))
    assert main(["plan", "--data", str(tmp_path / "runs.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("rows 0 of 0")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "expected a MODEL"),
        (["none.toml"], "none.toml"),
        (["none.json"], "none.json"),
        (["no_such_package:build"], "no_such_package"),
        (["MODEL", "--gpus", "0"], "--gpus: expected 1 to"),
        (["MODEL", "--batch", "-3"], "--batch: expected"),
        (["MODEL", "--seq", "-3"], "--seq: expected"),
        (["MODEL", "--hardware", "abacus"], "--hardware: expected"),
        (["--data", "none.json"], "none.json"),
    ],
)
def test_plan_refuses(
    words: list[str], problem: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model if word == "MODEL" else word for word in words]
    assert main(["plan", *given]) == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert len(printed.splitlines()) == 1
