"""`meshwright train` with adapters of PEFT: trained on two ranks, exported, loaded by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import load_tensors
from meshwright.cli import main
from meshwright.testing import Ranks
from support.clients import needs
from support.internals.recipes import TrainConfig, open_task
from support.internals.toml_source import read
from support.recipes.llama import CONFIG, run_llama, write_llama

needs("peft", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PEFT = 'model.peft={r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1}'


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20).view(2, 10)).logits


def start(folder: Path) -> list[str]:
    """Write weights for the adapters to stand on; the overrides that use them."""
    write_llama(folder)
    given = [f"model.hugging_face={folder / 'model'}", f"data.tokens={folder / 'tokens.npy'}"]
    base: Any = open_task(read(CONFIG, TrainConfig, overrides=given)).build().model
    base.save_pretrained(folder / "weights")
    return [f"model.weights={folder / 'weights'}", PEFT]


def test_adapters_are_trained_sharded_and_loaded_by_peft(ranks: Ranks, tmp_path: Path) -> None:
    import peft
    import transformers

    options = start(tmp_path)
    out = tmp_path / "out"
    found = ranks(
        2, run_llama, tmp_path, *options, "axes.shard=2", f"run.export={out}", timeout=300
    )
    assert "shard=2 equals one process over 3 steps in float64" in found[0].parity
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    before = logits_of(base)
    loaded = peft.PeftModel.from_pretrained(base, out)
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "weights")
    saved = load_tensors(found[0].checkpoint).tensors
    given = [f"model.hugging_face={tmp_path / 'model'}", f"data.tokens={tmp_path / 'tokens.npy'}"]
    config = read(CONFIG, TrainConfig, overrides=[*given, *options])
    trained = open_task(config).build().model
    trained.load_state_dict({name: saved[f"state/model/{name}"] for name in trained.state_dict()})
    assert torch.equal(logits_of(loaded), logits_of(trained))
    assert not torch.allclose(before, logits_of(loaded))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.peft={rr=8}"], "[model] peft: LoraConfig.__init__() got an unexpected keyword"),
        (['model.peft={r=8, target_modules=["nowhere"]}'], "[model] peft: Target modules"),
        (
            ["axes.tensor=2", "axes.shard=1", "tensor.rules=llama"],
            "[model] peft with axis tensor = 2: LoRA's matrices cannot be split over tensor ranks",
        ),
    ],
)
def test_a_mistake_is_one_line_before_ranks_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], expected: str
) -> None:
    write_llama(tmp_path)
    file = tmp_path / "llama.toml"
    file.write_text(CONFIG)
    given = ["model.hugging_face=model", "data.tokens=tokens.npy", f"run.folder={tmp_path}/run"]
    assert main(["train", str(file), *given, "axes.shard=2", PEFT, *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
