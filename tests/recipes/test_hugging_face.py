"""Models of transformers in the main job, from a configuration file to what it loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import load_tensors
from meshwright.cli import main
from meshwright.testing import Ranks
from support.internals.recipes import TrainConfig, open_task, sketch
from support.internals.toml_source import read
from support.recipes.llama import CONFIG, run_llama, write_llama
from support.recipes.runs import losses

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

TWO_BY_TWO = ("axes.shard=2", "axes.tensor=2", "tensor.rules=llama")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20).view(2, 10)).logits


@pytest.mark.slow
def test_a_llama_is_trained_over_shard_and_tensor_resumed_elsewhere_and_exported(
    ranks: Ranks, tmp_path: Path
) -> None:
    import transformers

    write_llama(tmp_path)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (whole,) = ranks(1, run_llama, tmp_path, f"run.folder={tmp_path / 'alone'}", timeout=240)
    first = ranks(4, run_llama, tmp_path, *TWO_BY_TWO, "run.steps=2", timeout=240)[0]
    assert "shard=2, tensor=2 equals one process over 2 steps in float64" in first.parity
    assert "(limit 1e-06, since the model casts to float32;" in first.parity
    out = tmp_path / "out"
    last = ranks(2, run_llama, tmp_path, "axes.shard=2", f"run.export={out}", timeout=240)[0]
    assert last.unit == "token" and list(losses(tmp_path)) == [1, 2, 3, 4]
    assert last.loss == pytest.approx(whole.loss, rel=1e-5)
    assert last.validation_loss == pytest.approx(whole.validation_loss, rel=1e-5)
    assert "Tokens a second" in Path(last.report).read_text(encoding="utf-8")
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32 and loaded.config.use_cache
    trained = transformers.LlamaForCausalLM(loaded.config)
    saved = load_tensors(last.checkpoint).tensors
    weights = {name: saved[f"state/model/{name}"] for name in trained.state_dict()}
    trained.load_state_dict(weights)
    assert torch.equal(logits_of(loaded), logits_of(trained))


def sketched(folder: Path, *overrides: str) -> torch.nn.Module:
    given = [f"model.hugging_face={folder / 'model'}", f"data.tokens={folder / 'tokens.npy'}"]
    return sketch(read(CONFIG, TrainConfig, overrides=[*given, *overrides]))


def test_the_class_is_that_of_architectures_or_one_of_causal_language(tmp_path: Path) -> None:
    write_llama(tmp_path, architectures=["LlamaForSequenceClassification"])
    assert type(sketched(tmp_path)).__name__ == "LlamaForSequenceClassification"
    other = tmp_path / "other"
    other.mkdir()
    write_llama(other, architectures=None)
    assert type(sketched(other)).__name__ == "LlamaForCausalLM"


def test_weights_of_a_folder_are_those_it_starts_from(tmp_path: Path) -> None:
    write_llama(tmp_path)
    given = [f"model.hugging_face={tmp_path / 'model'}", f"data.tokens={tmp_path / 'tokens.npy'}"]
    first: Any = open_task(read(CONFIG, TrainConfig, overrides=given)).build().model
    first.save_pretrained(tmp_path / "weights")
    given += [f"model.weights={tmp_path / 'weights'}", "train.seed=5"]
    again = open_task(read(CONFIG, TrainConfig, overrides=given)).build().model
    assert torch.equal(logits_of(first), logits_of(again))


AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


@pytest.mark.parametrize(
    ("more", "words", "expected"),
    [
        (
            {"architectures": ["OwnModel"]},
            [],
            "has no class 'OwnModel', which `architectures` names; code from a folder is never run",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            [],
            "[model] hugging_face",
        ),
        ({"vocab_size": 32}, [], "expected numbers below the model's vocab_size = 32, found 63"),
        ({}, ["model.weights=/nowhere"], "expected a folder of weights, found none at /nowhere"),
        ({}, ["model.dim=64"], "key 'dim' in [model] conflicts with 'hugging_face'"),
        ({}, ["axes.tensor=2"], "axis tensor = 2 has nothing to cut"),
    ],
)
def test_a_mistake_is_one_line_and_no_code_of_the_folder_runs(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    more: dict[str, object],
    words: list[str],
    expected: str,
) -> None:
    write_llama(tmp_path, **more)
    (tmp_path / "model/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    file = tmp_path / "llama.toml"
    file.write_text(CONFIG)
    given = ["model.hugging_face=model", "data.tokens=tokens.npy", f"run.folder={tmp_path}/run"]
    assert main(["train", str(file), *given, *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "ran").exists()
