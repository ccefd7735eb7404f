"""``meshwright plan``: answers, files, exit statuses and refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright import Plan
from meshwright.cli import main
from meshwright.planner import named_model
from support.internals.planner import GIB

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


def test_a_batch_below_the_gpus_is_one_that_some_layout_divides(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 million tokens are 31 sequences, which no number of data ranks of 48 GPUs but 1 divides.
    assert main(["plan", model, "--gpus", "48", "--seq", "132096"]) == 0
    assert ", 24 sequences of 132096 a step" in capsys.readouterr().out


def test_a_function_of_ones_own_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "planner.test_traced:small", "--gpus", "2", "--batch", "8", "--seq", "64"]
    assert main(words) == 0
    assert Plan.from_toml(capsys.readouterr().out).axes.world_size == 2


def test_the_header_is_of_what_is_recomputed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    (tmp_path / "mine.toml").write_text(MACHINE.replace("memory_gib = 80", "memory_gib = 1.45"))
    words = ["planner.test_traced:deep", "--gpus", "1", "--batch", "8", "--seq", "512"]
    assert main(["plan", *words, "--hardware", str(tmp_path / "mine.toml")]) == 0
    printed = capsys.readouterr().out
    plan = Plan.from_toml(printed)
    shape, trace = named_model("planner.test_traced:deep", 512)
    (found,) = re.findall(r"activations ([\d.]+) GiB", printed)
    # What is kept, and one block that is computed again.
    kept, again = 8 * trace.saved(plan.train.recompute), 8 * 512 * shape.saved
    assert 0.99 * kept < float(found) * GIB < 1.01 * (kept + again)
    # Less is recomputed than in the layout of whole blocks, which took longer.
    header, whole = re.findall(r"^# +([\d.]+) s[ ,]", printed, re.MULTILINE)[:2]
    assert float(header) < float(whole)


def test_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "list"]) == 0
    assert "h100" in capsys.readouterr().out.split()


def test_a_file_of_runs_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.json").write_text(json.dumps({"rows": []}))
    assert main(["plan", "--data", str(tmp_path / "runs.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("rows 0 of 0")


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}
MACHINE = """\
name = "mine"
memory_gib = 80
peak_tflops = 900
matmul_tflops = 700
memory_gbps = 3000
node = 8
intra_gbps = 450
inter_gbps = 50
"""


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``meshwright plan`` says to words that are wrong: one line."""
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err
    return printed.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "expected a MODEL"),
        (["none.toml"], "none.toml"),
        (["none.json"], "none.json"),
        (["no_such_package:build"], "no_such_package"),
        (["MODEL", "--gpus", "0"], "--gpus: expected 1 to"),
        (["MODEL", "--gpus", "-8"], "--gpus: expected 1 to"),
        (["MODEL", "--gpus", "nan"], "--gpus"),
        (["MODEL", "--gpus", "999999999999"], "--gpus: expected 1 to"),
        (["MODEL", "--batch", "-3"], "--batch: expected 0 to 10,000,000, found -3"),
        (["MODEL", "--batch", "10000001"], "--batch: expected 0 to 10,000,000, found 10,000,001"),
        (["MODEL", "--seq", "-3"], "--seq: expected"),
        (["MODEL", "--seq", "99999999999999999999"], "--seq: expected"),
        (["MODEL", "--hardware", "abacus"], "--hardware: expected"),
        (["MODEL", "--hardware", "../h100"], "--hardware: expected"),
        (["--data", "none.json"], "none.json"),
    ],
)
def test_plan_refuses(
    words: list[str], problem: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model if word == "MODEL" else word for word in words]
    assert problem in refusal(given, capsys)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("layers = 16", "layers = -1", "layers"),
        ("layers = 16", "layers = 1000000", "layers"),
        ("layers = 16", "layers = nan", "layers"),
        ("hidden = 2048", "hidden = inf", "hidden"),
        ("hidden = 2048", "hidden = true", "hidden"),
        ("heads = 16", "heads = 1000000000", "heads"),
        ("heads = 16", "heads = 33", "heads: expected to divide 2048 (hidden), found 33"),
        ("seq = 2048", "seq = 2048\nsaved = 1e308", "saved"),
        (
            "seq = 2048",
            "seq = 2048\nexperts = 8\ntopk = 2\nmoe_ffn = 64\ndense_layers = 99",
            "dense_layers: expected at most 16",
        ),
        ("heads = 16", "heads = 16\nkv_heads = 3", "kv_heads"),
        ("heads = 16", "heads = 16\nkv_heads = 64", "kv_heads"),
        ("ffn = 8192", "ffn = [8192]", "ffn"),
        ("vocab = 32000", "vocab = 1000000000000", "vocab"),
        ("seq = 2048", "seq = 0", "seq"),
        ("seq = 2048", "seq = 2048\nexperts = 8\ntopk = 9", "topk"),
        ("seq = 2048", "seq = 2048\nexperts = 8\ntopk = 2", "moe_ffn"),
        ("seq = 2048", "seq = 2048\ncolor = 3", "color"),
        ("seq = 2048", "seq = 2048\nseq = 1024", "seq"),
    ],
)
def test_a_wrong_model_is_one_line_with_its_field(
    old: str, new: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.toml").write_text(MODEL.replace(old, new))
    assert field in refusal([str(tmp_path / "wrong.toml")], capsys)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": -4}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"num_hidden_layers": math.nan}, "layers"),
        ({"num_hidden_layers": math.inf}, "layers"),
        ({"num_hidden_layers": "4"}, "key 'num_hidden_layers'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": {}}, "hidden"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4 (num_att"),
        ({"text_config": {"vocab_size": -3}}, "model_type"),
        ({"num_attention_heads": 5}, "num_attention_heads: expected to divide 64 (hidden_s"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "model_type"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "model_type"),
        ({"model_type": "t5", "d_kv": 64}, "model_type"),
        ({"num_local_experts": -1}, "experts"),
        ({"num_local_experts": "8"}, "experts"),
        (MIXTURE, "moe_intermediate_size: expected the feed-forward size"),
        (
            MIXTURE | {"n_shared_experts": 2, "moe_intermediate_size": "a"},
            "'moe_intermediate_size'",
        ),
        (MIXTURE | {"n_shared_experts": "2"}, "n_shared_experts"),
    ],
)
def test_a_wrong_configuration_is_one_line_with_its_field(
    change: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    assert field in refusal([str(tmp_path / "config.json")], capsys)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", "[" * 100_000])
def test_a_configuration_that_is_none(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json: expected" in refusal([str(tmp_path / "config.json")], capsys)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("node = 8", "node = 0", "node"),
        ("node = 8", "node = 8\nnodes = 4", "nodes"),
        ("memory_gib = 80", "memory_gib = nan", "memory_gib"),
        ("memory_gib = 80", "memory_gib = inf", "memory_gib"),
        ("memory_gib = 80", "memory_gib = -80", "memory_gib"),
        ("peak_tflops = 900", 'peak_tflops = "fast"', "peak_tflops"),
        ("memory_gib = 80", "memory_gib = 1e308", "memory_gib"),
        (
            "matmul_tflops = 700",
            "matmul_tflops = 901",
            "matmul_tflops: expected at most 900 (peak_tflops), found 901",
        ),
        ("matmul_tflops = 700", "matmul_tflops = 700\nmatmul_fp8_tflops = -1", "fp8_tflops"),
        ("inter_gbps = 50", "inter_gbps = 0", "inter_gbps"),
        ("inter_gbps = 50", "", "inter_gbps"),
        ("inter_gbps = 50", "inter_gbps = 50\n[node", "mine.toml"),
    ],
)
def test_a_wrong_machine_is_one_line_with_its_field(
    old: str, new: str, field: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(MACHINE.replace(old, new))
    assert field in refusal([model, "--hardware", str(tmp_path / "mine.toml")], capsys)


def test_a_machine_of_ones_own_is_planned_for(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(MACHINE)
    words = ["plan", model, "--hardware", str(tmp_path / "mine.toml"), "--fit-only"]
    assert main(words) == 0
    assert "of 75.2 usable GiB" in capsys.readouterr().out
