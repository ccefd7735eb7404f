"""Small models of every folder of transformers that has a tensor plan: random weights, no fetch.

Each is trained by the plan that it carries and compared with one process.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import torch

from meshwright import parallelize
from meshwright.errors import PlanError
from meshwright.plan import ExpertPlan, PipelinePlan, Plan, TensorPlan, TrainPlan
from support.expert_parallel.hugging_face import OTHERWISE, TINY
from support.expert_parallel.wide import wide
from support.internals.axes import Axes
from support.internals.reference import first_difference, record, train_reference

__all__ = [
    "CLOSE", "LOOSE", "example_of", "folders", "import_classes", "outcomes", "plan_of", "small",
    "trained",
]  # fmt: skip

LENGTH, ROWS, STEPS = 6, 4, 2
CLOSE, LOOSE = 1e-9, 1e-6
"""Relative, in the wide mode; and for folders that compute in float32 whatever they are told."""

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_M_ROPE = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
_KINDS = {"layer_types": ["full_attention", "full_attention"]}

SIZES: dict[str, Any] = {
    **TINY,
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"), 0.0),
    **dict.fromkeys(("num_kv_shared_layers", "zero_expert_num"), 0),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "embedding_rank"), 16),
    **dict.fromkeys(("num_layers", "decoder_sparse_step"), 1),
}
"""What a configuration gets where it has it."""

ALSO: dict[str, dict[str, Any]] = {
    **OTHERWISE,
    **dict.fromkeys(("glm4v", "glm_image", "glm_ocr", "paddleocr_vl", "cosmos3_edge"), _M_ROPE),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"), _M_ROPE),
    "cohere_compass": {
        **_KINDS,
        "rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [2, 1, 1]}},
    },
    "embedding_gemma2": {"num_global_key_value_heads": 2, "global_head_dim": 8},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n": {
        "vocab_size_per_layer_input": TINY["vocab_size"],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 2},
    "muse_glimmer_assistant": {"target_layer_ids": [0, 1], "block_size": 4},
    "neomme": {"head_dim": 16, "embedding_dim": 16},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
            "depthwise_separable_out_channel": 16,
            "bias_max_distance": 8,
        },
    },
}
"""What a folder's configuration must have beside them."""

NAMED = {
    "granite4_vision": ("granite4_vision", "Granite4VisionTextModel", "Granite4VisionTextConfig"),
    "internlm3": ("llama", "LlamaForCausalLM", "InternLM3Config"),
    "iquestcoder": ("llama", "LlamaForCausalLM", "IQuestCoderConfig"),
    "t5gemma": ("t5gemma", "T5GemmaForConditionalGeneration", "T5GemmaModuleConfig"),
    "t5gemma2": ("t5gemma2", "T5Gemma2Decoder", "T5Gemma2DecoderConfig"),
}
"""Folder of the model, its class, and the configuration that has the plan, where a rule of
`import_classes` does not find them."""


def folders() -> list[str]:
    """Find the folders of transformers whose configurations have a tensor plan."""
    import transformers

    files = (Path(transformers.__file__).parent / "models").glob("*/*.py")
    own = [file for file in files if not file.name.startswith("modular_")]
    word = re.compile(r"\bbase_model_tp_plan\b")
    return sorted({file.parent.name for file in own if word.search(file.read_text())})


def import_classes(folder: str) -> tuple[Any, Any]:
    """Choose a model and configuration: with a head for words, else the text model, else any."""
    models = "transformers.models"
    if folder in NAMED:
        home, model, config = NAMED[folder]
        source = importlib.import_module(f"{models}.{folder}.configuration_{folder}")
        module = importlib.import_module(f"{models}.{home}.modeling_{home}")
        return getattr(module, model), getattr(source, config)
    module = importlib.import_module(f"{models}.{folder}.modeling_{folder}")
    ends = ("ForCausalLM", "TextModel", "Model")
    found = []
    for name, kind in vars(module).items():
        config = getattr(kind, "config_class", None)
        if not (isinstance(kind, type) and getattr(config, "base_model_tp_plan", None)):
            continue
        if "PreTrained" not in name and "Vision" not in name and name.endswith(ends):
            rank = next(n for n, end in enumerate(ends) if name.endswith(end))
            found.append((rank, name, kind))
    kind = min(found, key=lambda each: each[:2])[2]
    return kind, kind.config_class


def small(folder: str, **more: Any) -> Any:
    """Build a model of ``folder`` in float64, in training, each parameter moved off its start."""
    kind, made = import_classes(folder)
    names = {field.name for field in dataclasses.fields(made)}
    given = {key: value for key, value in SIZES.items() if key in names}
    if "kv_lora_rank" in names:  # a head of keys and values for each of queries
        given["num_key_value_heads"] = given["num_attention_heads"]
    config = made(**{**given, **ALSO.get(folder, {}), **more})
    if folder == "t5gemma":  # an encoder and a decoder of this configuration
        config = kind.config_class(encoder=config, decoder=config, tie_word_embeddings=False)
    if folder == "t5gemma2":  # which the configuration of both sets
        config.dropout_rate = 0.0
    config._experts_implementation = "batched_mm"  # the default raises in float64
    torch.manual_seed(0)
    model = kind(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.nan_to_num(0.0).clamp(-1, 1))  # some leave what memory had
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def example_of(folder: str, rows: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Make a batch of words, or of what else the model takes."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int, features: int) -> torch.Tensor:
        return torch.randn(rows, length, features, dtype=torch.float64, generator=generator)

    hidden = TINY["hidden_size"]
    if folder == "muse_glimmer_assistant":
        return {
            "noise_embeds": numbers(4, hidden),
            "attention_mask": torch.ones(rows, LENGTH + 4, dtype=torch.long),
            "position_ids": torch.arange(LENGTH + 4).expand(rows, -1),
            "context_hidden_states": numbers(LENGTH, 2 * hidden),
        }
    words = torch.randint(3, TINY["vocab_size"], (rows, LENGTH), generator=generator)
    if folder == "qwen3_omni_moe":  # asks for embeddings of its own
        return {"inputs_embeds": numbers(LENGTH, hidden)}
    if folder == "voxtral_realtime":
        return {"input_ids": words, "t_cond": numbers(1, hidden)}
    if folder == "t5gemma":
        return {"input_ids": words, "decoder_input_ids": words.flip(1)}
    if folder == "t5gemma2":
        return {"input_ids": words, "encoder_hidden_states": numbers(LENGTH, hidden)}
    return {"input_ids": words}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A number that depends on every output, and is no plain sum."""
    found = output["logits"] if "logits" in output else output[0]
    return (found.sin().flatten(1).mean(1) - target).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def batches(folder: str, parts: int, part: int) -> list[Any]:
    """Two batches of which a rank has one part."""
    found = []
    for step in range(STEPS):
        given = {k: v.chunk(parts)[part] for k, v in example_of(folder, ROWS, step).items()}
        target = torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64)
        found.append((given, target.chunk(parts)[part]))
    return found


def plan_of(axes: dict[str, int]) -> Plan:
    """A plan that reads everything of the model."""
    piped = PipelinePlan(schedule="1f1b", microbatches=2, split="model")
    return Plan(
        axes=Axes.of(axes),
        tensor=TensorPlan(rules="model" if "tensor" in axes else None),
        pipeline=piped if "pipeline" in axes else PipelinePlan(),
        expert=ExpertPlan(modules="model", balance="none") if "expert" in axes else ExpertPlan(),
        train=TrainPlan(clip_norm=0.5),
    )


def trained(folder: str, axes: dict[str, int], by: float = CLOSE, **more: Any) -> str:
    """Train a model of ``folder`` on these ranks, and in one process: what differs, or empty."""
    with wide():
        expected = train_reference(
            small(folder, **more), batches(folder, 1, 0), optimizer=adamw, loss=loss_of,
            clip_norm=0.5,
        )  # fmt: skip
        laid = parallelize(
            small(folder, **more),
            plan_of(axes),
            optimizer=adamw,
            loss=loss_of,
            example=example_of(folder, 2, 5),
        )
        found = record(laid, batches(folder, laid.data_size, laid.data_rank))
    return str(first_difference(found, expected, by) or "")


def outcomes(names: list[str], axes: dict[str, int]) -> dict[str, str]:
    """Train models of ``names`` one after the other, to the first that is refused.

    What differs from one process, or the refusal: ranks that have raised are not to be used again.
    """
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = trained(name, axes)
        except PlanError as error:
            found[name] = f"refused: {error}"
            break
    return found
