"""Unmodified models of Hugging Face, split into 2 and 4 stages: they give what eager gives.

Tiny configurations with random weights; nothing is fetched. Dropout is on, with the same numbers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from meshwright.pipelining import Pipe, SplitPoint, pipeline

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 97, 12
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
}
TEXT: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
CAUSAL: dict[str, Any] = {**SIZES, **TEXT, "bos_token_id": 1, "eos_token_id": 2}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4}
HALF: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}
SMALL: dict[str, Any] = {"d_model": 32, "vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 2}
WHISPER: dict[str, Any] = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
}


def words() -> torch.Tensor:
    return torch.randint(3, WORDS, (2, LENGTH))


def text() -> dict[str, Any]:
    return {"input_ids": words(), "use_cache": False}


def masked() -> dict[str, Any]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 8:] = 0
    return {"input_ids": words(), "attention_mask": mask}


def windowed() -> dict[str, Any]:
    return {**masked(), "use_cache": False}


def translated() -> dict[str, Any]:
    return {"input_ids": words(), "decoder_input_ids": words(), "use_cache": False}


def heard() -> dict[str, Any]:
    features = torch.randn(2, 8, 32)
    return {"input_features": features, "decoder_input_ids": words(), "use_cache": False}


def seen() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


Case = tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]], tuple[str, ...]]
"""Model, configuration, its arguments, one microbatch, the lists of blocks."""
KV: dict[str, Any] = {**CAUSAL, "num_key_value_heads": 2}
MODEL = ("model.layers",)
CASES: dict[str, Case] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, **CAUSAL},
        text,
        ("transformer.h",),
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", KV, text, MODEL),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**SMALL, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        translated,
        ("encoder.block", "decoder.block"),
    ),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", KV, text, MODEL),
    "Mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**KV, "sliding_window": 8},
        windowed,
        MODEL,
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**KV, "num_local_experts": 4}, text, MODEL),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**KV, "head_dim": 8}, text, MODEL),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", CAUSAL, text, MODEL),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", CAUSAL, text, ("gpt_neox.layers",)),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**CAUSAL, "ffn_dim": 64, "word_embed_proj_dim": 32},
        text,
        ("model.decoder.layers",),
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", {**SIZES, **TEXT}, masked, ("bert.encoder.layer",)),
    "RoBERTa": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        CAUSAL,
        masked,
        ("roberta.encoder.layer",),
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**SIZES, **IMAGE}, seen, ("vit.layers",)),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**HALF, **TEXT, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": {**HALF, **IMAGE},
            "projection_dim": 16,
        },
        lambda: {"input_ids": words(), **seen()},
        ("text_model.encoder.layers", "vision_model.encoder.layers"),
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SMALL, **WHISPER},
        heard,
        ("model.encoder.layers", "model.decoder.layers"),
    ),
}
QUICK = ("GPT-2", "Llama", "T5")


def loss(output: Any) -> torch.Tensor:
    """Something of all that the model gives."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.square().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


def gradients(pipe: Pipe, alone: nn.Module) -> dict[str, torch.Tensor]:
    """Of the stages, by the first name in the model; those of holders are summed."""
    names: dict[int, str] = {}
    first = {
        name: names.setdefault(id(parameter), name)
        for name, parameter in alone.named_parameters(remove_duplicate=False)
    }
    found: dict[str, torch.Tensor] = {}
    for stage in range(pipe.num_stages):
        for name, parameter in pipe.get_stage_module(stage).named_parameters():
            if parameter.grad is not None:
                key = first[name]
                found[key] = found[key] + parameter.grad if key in found else parameter.grad
    return found


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_split(name: str) -> None:
    model_name, config_name, settings, given, lists = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings)
    alone: nn.Module = getattr(transformers, model_name)(config)
    model, arguments = copy.deepcopy(alone), given()
    torch.manual_seed(1)
    expected = alone(**arguments)
    loss(expected).backward()
    blocks = [f"{path}.{i}" for path in lists for i in range(len(model.get_submodule(path)))]
    assert len(blocks) == 4
    for stages in (2, 4):
        spec = dict.fromkeys(blocks[:: 4 // stages][1:], SplitPoint.BEGINNING)
        pipe = pipeline(model, (), arguments, split_spec=spec)
        assert pipe.num_stages == stages
        for parameter in pipe.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        found = fx.Interpreter(pipe.split_gm).run(*arguments.values())
        assert type(found) is type(expected)
        torch.testing.assert_close(dict(found), dict(expected))
        loss(found).backward()
        wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        assert wanted
        torch.testing.assert_close(gradients(pipe, alone), wanted)
        for stage in range(stages):
            assert pipe.get_stage_module(stage).state_dict().keys() <= model.state_dict().keys()
