"""A tiny Llama as a configuration file, tokens for it, and a run of the main job that trains it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy

from meshwright.comm import connect
from support.internals.recipes import RunOutcome, TrainConfig, train
from support.internals.toml_source import read

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
CONFIG = """
[train]
clip_norm = 1.0
[model]
context = 16
[data]
batch_size = 8
validation_windows = 6
[optimizer]
learning_rate = 1e-2
warmup_steps = 0
final_fraction = 1.0
[run]
steps = 4
trace_steps = 2
parity_steps = 3
check_parity = true
accept_changes = true
"""


def write_llama(folder: Path, **more: object) -> None:
    """Write ``model/config.json`` and ``tokens.npy``."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({**SHAPE, **more}))
    steps = numpy.random.default_rng(0).integers(0, 3, 3000)
    numpy.save(folder / "tokens.npy", (numpy.cumsum(steps) % 64).astype(numpy.uint16))


def run_llama(folder: Path, *overrides: str) -> RunOutcome:
    """A whole run on this rank."""
    given = [f"model.hugging_face={folder / 'model'}", f"data.tokens={folder / 'tokens.npy'}"]
    given += [f"run.folder={folder / 'run'}", *overrides]
    return train(read(CONFIG, TrainConfig, overrides=given), connect(), lambda line: None)
