"""Models of Hugging Face: trained in parts, exported, read by `from_pretrained`, imported again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import checkpoint
from meshwright.data_parallel import fully_shard
from meshwright.testing import Ranks
from support.checkpoint.loop_layouts import IDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

IDS_OF_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **IDS_OF_ENDS,
}
GPT2: dict[str, Any] = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    **IDS_OF_ENDS,
}
CASES = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
}


def build(name: str, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.partition(",")[0], **CASES[name])
    return AutoModelForCausalLM.from_config(config).eval()


def save_and_export(folder: Path, name: str) -> None:
    """On every rank: a model in parts becomes a folder of several files."""
    model = build(name, 0)
    extra = {"config": model.config.to_dict()}
    path = checkpoint.save(folder / "run", 1, model=fully_shard(model), extra=extra)
    checkpoint.export_weights(path, folder / "exported", to="hf", shard_bytes=4000)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_by_from_pretrained(ranks: Ranks, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    ranks(2, save_and_export, tmp_path, name, timeout=300)
    expected = build(name, 0)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert torch.equal(found(IDS).logits, expected(IDS).logits)
    path = checkpoint.import_weights(tmp_path / "exported", tmp_path / "back", source_format="hf")
    model = build(name, 1)
    checkpoint.load(path, model=model)
    for (key, a), b in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
