"""What a checkpoint holds, and where two differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright import checkpoint
from meshwright.checkpoint import ShardedPiece, contents, differences
from meshwright.cli import main
from meshwright.testing import Ranks
from support.checkpoint.faulty_storage import on_ranks
from support.checkpoint.loop_layouts import Net
from support.internals.layout import Box


def state(changes: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    found = {"a.w": torch.arange(6.0).view(2, 3), "a.b": torch.ones(3), "c": torch.tensor(4)}
    return {**found, **(changes or {})}


def test_contents_are_a_tree_with_sizes_and_layout(tmp_path: Path) -> None:
    def save(group: object) -> Path:
        rank = group.rank  # pyrefly: ignore[missing-attribute]
        rows = torch.arange(3.0) + 3 * rank
        piece = ShardedPiece(global_shape=(2, 3), boxes=(Box((rank, 0), (1, 3)),), tensor=rows)
        tensors = {**state(), "a.w": piece}
        return checkpoint.save_tensors(tmp_path, tensors, {"lr": 0.1}, step=7, communicator=group)  # pyrefly: ignore

    path = on_ranks(2, save)[0]
    assert isinstance(path, Path)
    found = contents(path)
    assert (found.step, found.ranks, len(found.files)) == (7, None, 2)
    assert found.values == {"lr": 0.1}
    assert found.tensors["a.w"] == {
        "dtype": "float32",
        "shape": [2, 3],
        "bytes": 24,
        "layout": "2 pieces along dim 0",
    }
    lines = list(found.lines())
    assert lines[0].startswith("step 7: 3 tensors, ")
    shown = [" ".join(line.split()) for line in lines[1:]]
    assert shown == [
        "a 2 tensors, 36 B",
        "b float32 (3,), 12 B, whole",
        "w float32 (2, 3), 24 B, 2 pieces along dim 0",
        "c int64 (), 8 B, whole",
        "values",
        "lr = 0.1",
    ]
    assert [" ".join(line.split()) for line in found.lines(1)][1:3] == [
        "a 2 tensors, 36 B",
        "c int64 (), 8 B, whole",
    ]


def test_differences_are_named_the_largest_first(tmp_path: Path) -> None:
    first = checkpoint.save_tensors(tmp_path / "a", state(), {"lr": 0.1, "seed": 1}, step=1)
    same = checkpoint.save_tensors(tmp_path / "b", state(), {"lr": 0.1, "seed": 1}, step=2)
    assert differences(first, same) == []
    changes = {
        "a.w": torch.tensor([[0.0, 1, 2], [3, 4, 5.5]]),
        "a.b": torch.tensor([1.0, 1.0, 3.0]),
        "d": torch.ones(1),
        "c": torch.tensor([4]),
    }
    other = checkpoint.save_tensors(tmp_path / "c", state(changes), {"lr": 0.2, "seed": 1}, step=1)
    found = {each.name: each for each in differences(first, other)}
    assert set(list(found)[:3]) == {"c", "d", "lr"}
    assert list(found)[3:] == ["a.b", "a.w"]
    assert found["a.b"].largest == 2
    assert found["a.b"].relative == pytest.approx(2 / 3)
    assert found["a.b"].text.startswith("1 of 3 elements, by up to 2")
    assert found["d"].text == f"only in {other}"
    assert found["c"].text == "int64 () and int64 (1,)"
    assert found["lr"].text == "0.1 and 0.2"
    nan = checkpoint.save_tensors(
        tmp_path / "d", state({"a.b": torch.full((3,), torch.nan)}), {"lr": 0.1, "seed": 1}, step=1
    )
    assert differences(nan, nan) == []
    assert [each.relative for each in differences(first, nan)] == [float("inf")]


def test_differences_are_those_of_bits_and_of_whole_numbers(tmp_path: Path) -> None:
    """Equal infinities are none, and integers that float64 has not all are told apart."""
    mask, large = torch.tensor([-torch.inf, 1.0]), torch.tensor([2**60, 7])
    pairs = {"mask": (mask, mask * 2), "large": (large, large + 1), "zero": (mask * 0, -mask * 0)}
    pairs["unsigned"] = (large.to(torch.uint64), (large + 1).to(torch.uint64))
    pairs["far"] = (torch.tensor([2**62]), torch.tensor([-(2**63)]))
    pairs["endless"] = (torch.zeros(1), torch.full((1,), torch.inf))
    paths = [
        checkpoint.save_tensors(tmp_path, {k: v[n] for k, v in pairs.items()}, {}, step=n)
        for n in range(2)
    ]
    found = {each.name: each.text for each in differences(*paths)}
    assert found["endless"] == "1 of 1 elements, by up to inf, relative inf"
    assert found["far"] == "1 of 1 elements, by up to 1.38e+19, relative 1.5"
    assert found["mask"] == "1 of 2 elements, by up to 1, relative 0.5"
    assert found["large"].startswith("2 of 2 elements, by up to 1, relative")
    assert found["unsigned"].startswith("2 of 2 elements, by up to 1, relative")
    assert found["zero"].startswith("1 of 2 elements")


# ------------------------------------------------------------------------------- command line


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *words])
    out, error = capsys.readouterr()
    return status, out, error


def test_the_commands_show_compare_and_convert(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(checkpoint.save(tmp_path / "run", 3, model=Net(0), extra={"note": "begun"}))
    status, out, _ = told(capsys, "show", path)
    assert status == 0
    assert "saved on 1 ranks" in out
    assert "extra.note = begun" in out
    assert len(out.splitlines()) < len(told(capsys, "show", path, "--depth", "0")[1].splitlines())
    assert " values" in out.partition("values\n")[2], "states of generators are folded"
    status, out, _ = told(capsys, "show", path, "--json")
    assert json.loads(out)["tensors"]["state/model/first.bias"]["shape"] == [8]
    for form in checkpoint.FORMATS:
        target, back = str(tmp_path / form), str(tmp_path / f"{form}-back")
        status, out, _ = told(capsys, "export", path, target, "--to", form)
        assert (status, out[:6]) == (0, "wrote ")
        assert ("without config.json" in out) == (form == "hf")
        trusted = ["--trust-pickle"] if form == "dcp" else []
        status, out, _ = told(
            capsys, "import", target, back, "--from", form, "--step", "3", *trusted
        )
        assert (status, out[:6]) == (0, "wrote ")
        status, out, _ = told(capsys, "diff", path, f"{back}/step_00000003", "--json")
        assert status == 1  # random state and values are not converted
        names = [row["name"] for row in json.loads(out)["differences"]]
        assert not [name for name in names if name.startswith("state/model/")]
    status, out, _ = told(capsys, "diff", path, path)
    assert (status, out) == (0, "no difference\n")


@pytest.mark.slow
def test_ranks_that_a_launcher_has_started_share_the_work(ranks: Ranks, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "run", 3, model=Net(0))
    words = ["checkpoint", "export", str(path), str(tmp_path / "out"), "--to", "dcp"]
    assert ranks(2, main, words, connected=False) == [0, 0]
    assert (tmp_path / "out" / "__1_0.distcp").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["show", "{0}"], 2, "found a folder of checkpoints: give {0}/step_00000003"),
        (["show", "{0}/none"], 1, "there is no readable checkpoint"),
        (["export", "{1}", "x", "--to", "onnx"], 2, "--to: expected hf, dcp, torch, found onnx"),
        (["export", "{1}", "{0}", "--to", "hf"], 1, "exists and is never overwritten"),
        (["export", "{1}", "x", "--to", "dcp", "--config", "y"], 2, "config is for to='hf'"),
        (["export", "{1}", "x", "--to", "hf", "--dtype", "int8"], 2, "--dtype: expected float32"),
        (["export", "{1}", "x", "--to", "hf", "--shard-mb", "0"], 2, "--shard-mb: expected"),
        (["import", "{0}/none", "x", "--from", "hf"], 1, "found nothing there"),
        (["import", "{0}", "x", "--from", "dcp"], 1, "--trust-pickle"),
        (["diff", "{1}", "{1}", "--largest", "-1"], 2, "--largest: expected"),
        ([], 2, "expected a command: checkpoint verify, checkpoint show"),
        (["shovv", "x"], 2, "did you mean 'checkpoint show'?"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], status: int, expected: str
) -> None:
    path = checkpoint.save(tmp_path, 3, model=Net(0))
    places = (str(tmp_path), str(path))
    found = told(capsys, *(word.format(*places) for word in words))
    assert found[0] == status
    assert expected.format(*places) in found[2]
    assert found[2].count("\n") == 1


def test_help_is_there_at_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, "--help")
    assert status == 0
    for name in ("verify", "show", "diff", "export", "import"):
        assert f"checkpoint {name}" in out
        with pytest.raises(SystemExit) as caught:
            main(["checkpoint", name, "--help"])
        assert not caught.value.code
        assert "FOLDER" in capsys.readouterr().out
