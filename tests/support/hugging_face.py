"""Small models of Hugging Face with random weights: nothing is fetched.

Two or four blocks, 16 features; the module that imports this one has to skip where `transformers`
is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.testing import Sample

os.environ["HF_HUB_OFFLINE"] = "1"

WORDS, LENGTH = 31, 6
Inputs = Callable[[int, torch.Generator], dict[str, torch.Tensor]]

ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
IDS: dict[str, Any] = {
    "vocab_size": WORDS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TEXT: dict[str, Any] = {**ENCODER, **IDS, "max_position_embeddings": 32}
CAUSAL: dict[str, Any] = {**TEXT, "use_cache": False}
GROUPED: dict[str, Any] = {**CAUSAL, "num_key_value_heads": 2, "head_dim": 4}
IMAGE: dict[str, Any] = {**ENCODER, "image_size": 8, "patch_size": 4, "num_channels": 3}
PAIR: dict[str, Any] = {**IDS, "d_model": 16, "use_cache": False}
WHISPER: dict[str, Any] = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
    "num_mel_bins": 4,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
}
DRY = dict.fromkeys(
    (
        *("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "dropout_rate"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
        *("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    ),
    0.0,
)
"""All that configurations call the probability of a dropout."""


def words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (batch, LENGTH), generator=generator)}


def masked_words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[1::2, 4:] = 0
    return {**words(batch, generator), "attention_mask": mask}


def pairs_of_words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    decoded = words(batch, generator)["input_ids"]
    return {**words(batch, generator), "decoder_input_ids": decoded}


def pictures(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}


def pictures_and_words(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**words(batch, generator), **pictures(batch, generator)}


def sounds(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    decoded = words(batch, generator)["input_ids"]
    features = torch.randn(batch, 4, 20, generator=generator)
    return {"input_features": features, "decoder_input_ids": decoded}


class Kind(NamedTuple):
    """A model: its class and configuration, a batch, and its lists of blocks, four in all."""

    model: str
    config: Mapping[str, Any]
    inputs: Inputs
    lists: tuple[str, ...]
    rules: str = ""
    """The set of `[tensor] rules` that is named for it."""
    outputs: tuple[str, ...] = ("logits",)
    """What of its output the loss is made of."""
    tolerance: float = 1e-9
    """Relative, of its training in float64."""

    @property
    def writes(self) -> bool:
        """True where its class has `generate()`."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


MODEL = ("model.layers",)
SINGLE = 1e-6
"""A tolerance where gradients are summed in float32 whatever the model's dtype is."""
KINDS: dict[str, Kind] = {
    "GPT-2": Kind(
        "GPT2LMHeadModel",
        {
            **IDS,
            "use_cache": False,
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 32,
        },
        words,
        ("transformer.h",),
        "gpt2",
    ),
    "Llama": Kind("LlamaForCausalLM", GROUPED, words, MODEL, "llama"),
    "Qwen2": Kind("Qwen2ForCausalLM", GROUPED, words, MODEL, "qwen2"),
    "Qwen3": Kind("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, words, MODEL, "qwen3"),
    "Mistral": Kind(
        "MistralForCausalLM", {**GROUPED, "sliding_window": 4}, masked_words, MODEL, "mistral"
    ),
    "Mixtral": Kind(
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        words,
        MODEL,
        "mixtral",
    ),
    "Gemma": Kind("GemmaForCausalLM", GROUPED, words, MODEL, "gemma", tolerance=SINGLE),
    "Gemma 2": Kind(
        "Gemma2ForCausalLM",
        {**GROUPED, "sliding_window": 4},
        words,
        MODEL,
        "gemma",
        tolerance=SINGLE,
    ),
    "Phi-3": Kind("Phi3ForCausalLM", CAUSAL, words, MODEL),
    "GPT-NeoX": Kind("GPTNeoXForCausalLM", CAUSAL, words, ("gpt_neox.layers",), "gpt_neox"),
    "OPT": Kind(
        "OPTForCausalLM",
        {**CAUSAL, "ffn_dim": 24, "word_embed_proj_dim": 16},
        words,
        ("model.decoder.layers",),
    ),
    "BERT": Kind("BertForMaskedLM", TEXT, masked_words, ("bert.encoder.layer",), "bert"),
    "RoBERTa": Kind("RobertaForMaskedLM", TEXT, masked_words, ("roberta.encoder.layer",), "bert"),
    "T5": Kind(
        "T5ForConditionalGeneration",
        {
            **PAIR,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        pairs_of_words,
        ("encoder.block", "decoder.block"),
        "t5",
    ),
    "Whisper": Kind(
        "WhisperForConditionalGeneration",
        {**PAIR, **WHISPER},
        sounds,
        ("model.encoder.layers", "model.decoder.layers"),
        "whisper",
    ),
    "ViT": Kind(
        "ViTForImageClassification", {**IMAGE, "num_labels": 5}, pictures, ("vit.layers",), "vit"
    ),
    "CLIP": Kind(
        "CLIPModel",
        {
            "text_config": {**TEXT, "num_hidden_layers": 2},
            "vision_config": {**IMAGE, "num_hidden_layers": 2},
            "projection_dim": 12,
        },
        pictures_and_words,
        ("text_model.encoder.layers", "vision_model.encoder.layers"),
        "clip",
        ("text_embeds", "image_embeds"),
    ),
}


def model_of(name: str, *, is_plain: bool = False, **changes: Any) -> Any:
    """Build a model; one that ``is_plain`` as its package makes it.

    The others have no dropout, experts that know float64, and no biases or scales of 0 or 1.
    """
    import transformers

    kind = KINDS[name]
    made = getattr(transformers, kind.model)
    dry = {} if is_plain else DRY
    config = made.config_class(**{**dry, **kind.config, **changes})
    if is_plain:
        return made(config)
    config._experts_implementation = "batched_mm"
    model = made(config)
    for parameter in model.parameters():
        # Biases and scales start at zeros and ones, which hide what is done to them.
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1) / 2, std=0.3)
    return model


def blocks_of(name: str, model: nn.Module) -> list[str]:
    """List the names of the blocks, in the order in which they run."""
    lists = KINDS[name].lists
    return [f"{path}.{i}" for path in lists for i in range(len(model.get_submodule(path)))]  # pyrefly: ignore[bad-argument-type]


def sample_of(name: str, **changes: Any) -> Sample:
    """Make a sample of a model, ``changes`` to its configuration included."""
    kind = KINDS[name]

    def build() -> nn.Module:
        return model_of(name, **changes)

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        found = torch.cat([output[key].flatten(1) for key in kind.outputs], dim=1)
        return (found.sin().mean(1) - target).square().mean()

    return Sample(
        name=name,
        build=build,
        inputs=kind.inputs,
        targets=lambda batch, generator: torch.randn(batch, generator=generator),
        loss=loss,
    )
