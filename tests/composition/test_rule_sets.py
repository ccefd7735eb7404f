"""The named sets of rules: a tiny model of each kind trains over axis tensor as one process.

Nothing is fetched. Each rank imports the package of Hugging Face, so these cases are slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from meshwright.axes import Axes
from meshwright.composition.tensor_axis.tensor_rules import RULES
from meshwright.plan import Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, Sample, assert_same_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

WORDS, LENGTH = 31, 6
Inputs = Callable[[int, torch.Generator], dict[str, torch.Tensor]]

DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DRY = dict.fromkeys(
    (
        *("dropout", "attention_dropout", "hidden_dropout", "dropout_rate", "activation_dropout"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    0.0,
)
PICTURES: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (batch, LENGTH), generator=generator)}


def pairs_of_words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    decoded = words(batch, generator)["input_ids"]
    return {**words(batch, generator), "decoder_input_ids": decoded}


def pictures(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}


def sounds(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    decoded = words(batch, generator)["input_ids"]
    features = torch.randn(batch, 4, 20, generator=generator)
    return {"input_features": features, "decoder_input_ids": decoded}


class Kind(NamedTuple):
    """A model: its class, its configuration, a batch, and what of its output is compared."""

    model: str
    config: dict[str, Any]
    inputs: Inputs
    output: str = "logits"


KINDS: dict[str, Kind] = {
    "gemma": Kind("GemmaForCausalLM", DECODER, words),
    "mixtral": Kind(
        "MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, words
    ),
    "gpt_neox": Kind("GPTNeoXForCausalLM", DECODER, words),
    "bert": Kind("BertForMaskedLM", {**ENCODER, "vocab_size": WORDS}, words),
    "t5": Kind(
        "T5ForConditionalGeneration",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "use_cache": False,
        },
        pairs_of_words,
    ),
    "vit": Kind("ViTForImageClassification", {**ENCODER, **PICTURES, "num_labels": 5}, pictures),
    "clip": Kind(
        "CLIPModel",
        {
            "text_config": {**ENCODER, "vocab_size": WORDS, "max_position_embeddings": 8},
            "vision_config": {**ENCODER, **PICTURES},
            "projection_dim": 12,
        },
        lambda batch, generator: {**words(batch, generator), **pictures(batch, generator)},
        "text_embeds",
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": WORDS,
            "num_mel_bins": 4,
            "max_source_positions": 10,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "max_target_positions": 8,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "use_cache": False,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        sounds,
    ),
}


def sample_of(name: str) -> Sample:
    kind = KINDS[name]

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, kind.model)
        config = made.config_class(**{**DRY, **kind.config})
        config._experts_implementation = "eager"  # the others know no float64
        model: nn.Module = made(config)
        for parameter in model.parameters():
            # Biases and scales start at zeros and ones, which hide what is done to them.
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1) / 2, std=0.3)
        return model

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        found = output[kind.output]
        if name == "clip":
            found = torch.cat([found, output["image_embeds"]], dim=1)
        return (found.flatten(1).sin().mean(1) - target).square().mean()

    return Sample(
        name=name,
        build=build,
        inputs=kind.inputs,
        targets=lambda batch, generator: torch.randn(batch, generator=generator),
        loss=loss,
    )


@pytest.mark.parametrize("name", KINDS)
def test_trains_over_tensor_ranks_as_one_process(ranks: Ranks, name: str) -> None:
    plan = Plan(
        axes=Axes.of({"tensor": 2}),
        tensor=TensorPlan(rules=name),
        train=TrainPlan(clip_norm=0.5),
    )
    assert_same_training(sample_of(name), plan, world=2, ranks=ranks)


@pytest.mark.parametrize("name", KINDS)
def test_every_rule_of_a_set_is_of_use(name: str) -> None:
    from meshwright.plan import match_names

    with torch.device("meta"):
        modules = [found for found, _ in sample_of(name).build().named_modules()]
    unused = [pattern for pattern in RULES[name] if not match_names(pattern, modules)]
    assert set(unused) <= {
        "**.self_attn.q_norm",  # of qwen3, which shares the set
        "**.self_attn.k_norm",
        "**.mlp.gate_proj",  # of models without experts
        "**.mlp.up_proj",
        "**.mlp.down_proj",
        "**.wi",  # of the first T5, whose layer has no gate
    }
