"""Sizes of models: from configurations, with the published numbers of parameters, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from meshwright.errors import PlanError
from meshwright.planner import ModelShape, load_hardware, model_shape
from support.internals.planner import from_config, hardware_names

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 48,
    "n_embd": 1600,
    "n_head": 25,
    "vocab_size": 50257,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(LLAMA, 8.03), (GPT2, 1.557), (MIXTRAL, 46.7), (DEEPSEEK, 671)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_the_published_ones(config: dict[str, object], billions: float) -> None:
    shape = from_config(config, None)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_operations_of_a_token_are_two_for_each_parameter_and_attention() -> None:
    shape = from_config(LLAMA, 1)
    matrices = shape.parameters - 4096 * 128256 - 32 * 2 * 4096
    assert shape.flops == pytest.approx(2 * (matrices + 32 * 2 * 4096))
    longer = from_config(LLAMA, 8192)
    assert longer.flops - shape.flops == pytest.approx(2 * 32 * 2 * 4096 * 8191)


def test_a_model_reads_the_same_from_toml_and_from_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = "name = 'llama'\nlayers = 32\nhidden = 4096\nheads = 32\nkv_heads = 8\nffn = 14336\n"
    (tmp_path / "model.toml").write_text(text + "vocab = 128256\nseq = 8192\n")
    expected = from_config(LLAMA, 4096)
    for name in ("config.json", "model.toml"):
        assert model_shape(str(tmp_path / name), 4096) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("layers = -1", "layers"),
        ("layers = 1000000", "layers"),
        ("hidden = nan", "hidden"),
        ("heads = 0", "heads"),
        ("heads = 65", "heads"),
        ("experts = 8", "topk"),
        ("hiddn = 4096", "hiddn"),
        ("vocab = 1e300", "vocab"),
    ],
)
def test_a_wrong_size_is_one_line_that_names_its_field(
    text: str, names: str, tmp_path: Path
) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100, "seq": 16}
    key = text.split(" = ")[0]
    lines = [f"{name} = {size}" for name, size in sizes.items() if name != key]
    (tmp_path / "model.toml").write_text("\n".join([*lines, text]))
    with pytest.raises(PlanError) as error:
        model_shape(str(tmp_path / "model.toml"))
    assert names in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_window_of_a_configuration_counts_where_it_is_used() -> None:
    windowed = LLAMA | {"sliding_window": 1024}
    assert from_config(windowed, None).window == 1024
    for other in ({"use_sliding_window": False}, {"layer_types": ["full_attention"] * 32}):
        assert from_config(windowed | other, None).window == 0


def test_an_official_configuration_without_the_key_is_tied_as_its_type() -> None:
    for config, is_tied in ((GPT2, True), (LLAMA, False)):
        left = {key: value for key, value in config.items() if "tie" not in key}
        assert from_config(left, None).tied is is_tied


def test_a_configuration_without_a_size_is_named() -> None:
    with pytest.raises(PlanError, match="num_hidden_layers"):
        from_config({key: value for key, value in LLAMA.items() if "layers" not in key}, None)
    with pytest.raises(PlanError, match="layers"):
        from_config(LLAMA | {"num_hidden_layers": "many"}, None)


def test_shipped_machines_read_and_others_are_refused(tmp_path: Path) -> None:
    for name in hardware_names():
        machine = load_hardware(name)
        assert machine.name == name
        assert machine.matmul_tflops < machine.peak_tflops
    with pytest.raises(PlanError, match="h100"):
        load_hardware("h1000")
    (tmp_path / "mine.toml").write_text("name = 'mine'\nmemory_gib = -8\n")
    with pytest.raises(PlanError, match="memory_gib"):
        load_hardware(str(tmp_path / "mine.toml"))


def test_layers_that_cannot_be_are_refused_before_any_search() -> None:
    for size in (10**6, math.nan, 2.0, -1, 0):
        with pytest.raises(PlanError, match="layers"):
            ModelShape(layers=size, hidden=64, heads=4, ffn=256, vocab=100, seq=16)  # pyrefly: ignore
