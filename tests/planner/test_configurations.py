"""Parameters of config.json files against those that transformers makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from meshwright.errors import PlanError
from support.internals.planner import from_config

transformers = pytest.importorskip("transformers")

QUICK = "gpt2 falcon gpt_bigcode starcoder2 arcee gemma2 llama4_text ernie4_5_moe"
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "opt": {
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
    },
}
"""What defaults lack; OPT of 1.3 billion, since learned positions, which do not count, are less."""
PARTS = 8


def counted(kind: str) -> tuple[int, dict[str, Any]]:
    """Parameters of the type's default model, and its config.json without what defaults to tied."""
    config = transformers.CONFIG_MAPPING[kind](**CHANGES.get(kind, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string(use_diff=True))
    written.pop("tie_word_embeddings", None)
    return sum(parameter.numel() for parameter in model.parameters()), written


@pytest.mark.parametrize("kind", QUICK.split())
def test_parameters_are_those_of_transformers(kind: str) -> None:
    parameters, config = counted(kind)
    assert from_config(config, 2048).parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type_is_counted_within_one_percent_or_refused(part: int) -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    kinds = sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[part::PARTS]
    unbuilt, refused, wrong = [], [], {}
    for kind in kinds:
        try:
            parameters, config = counted(kind)
        except Exception as error:  # defaults of some types make no model
            unbuilt.append((kind, str(error)))
            continue
        try:
            error = from_config(config, 2048).parameters / parameters - 1
        except PlanError as said:
            assert f"model_type: the sizes of '{config['model_type']}'" in str(said) or (
                "text_config" in config and "model_type: the sizes of" in str(said)
            )
            refused.append(kind)
            continue
        if abs(error) > 0.01:
            wrong[kind] = error
    print(f"refused {refused}, not built {unbuilt}")
    assert wrong == {}
    assert len(unbuilt) <= 5 and len(refused) <= 2 * len(kinds) // 3


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"mamba_d_state": 16}, "jamba"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "qwen3_next"),
        ({"encoder_layers": 6, "decoder_layers": 6}, "bart"),
        ({"vision_config": {}}, "gemma3"),
        ({}, "longcat_flash"),
    ],
)
def test_models_that_are_no_decoder_of_equal_layers_are_refused(
    change: dict[str, Any], kind: str
) -> None:
    with pytest.raises(PlanError, match="model_type") as error:
        from_config({"model_type": kind, "hidden_size": 64} | change, 16, "config.json")
    assert kind in str(error.value) and len(str(error.value).splitlines()) == 1
