"""Small dense models of Hugging Face, with random weights; nothing is fetched."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from support.expert_parallel.hugging_face import TINY, import_folder

os.environ["HF_HUB_OFFLINE"] = "1"

__all__ = ["DENSE", "dense"]

DENSE = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""By folder, the class of the model."""


def dense(folder: str, **more: Any) -> Any:
    """Build a model of ``folder`` in float64, in training; windows are of 4 positions."""
    kind = getattr(import_folder(folder), DENSE[folder])
    names = {field.name for field in dataclasses.fields(kind.config_class)}
    given = {key: value for key, value in TINY.items() if key in names}
    if "layer_types" in names and folder == "gemma3":
        given["layer_types"] = ["sliding_attention", "full_attention"]
    config = kind.config_class(**{**given, **more})
    torch.manual_seed(0)
    model = kind(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
