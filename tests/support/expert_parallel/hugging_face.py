"""Small models of Hugging Face that have experts: random weights, nothing is fetched."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import comm, parallelize_module
from meshwright.expert_parallel import ExpertParallel
from support.expert_parallel.samples import expert_mesh
from support.expert_parallel.wide import wide

os.environ["HF_HUB_OFFLINE"] = "1"

__all__ = [
    "CLOSE", "FIVE", "check_gradients", "check_sum", "close", "experts_in", "folders",
    "import_folder", "over_experts", "own", "plain_and_split", "share", "tiny", "trained", "words",
]  # fmt: skip

FIVE = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
CLOSE, FLOOR = 1e-9, 1e-14
"""Of the largest element of a tensor; and what counts as zero."""
WORDS, LENGTH, BATCH = 31, 6, 4

TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(
        (
            *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("shared_intermediate_size", "shared_experts_intermediate_size"),
            *("moe_shared_expert_intermediate_size", "dense_intermediate_size"),
            *("prefix_dense_intermediate_size", "router_hidden_size", "ssm_state_size"),
            *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "hc_lowrank"),
        ),
        16,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim"),
            *("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "swa_head_dim"),
            *("mamba_head_dim", "mamba_d_head", "rotary_dim", "global_head_dim"),
        ),
        8,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "swa_num_attention_heads", "linear_num_heads"),
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        ),
        4,
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_key_value_heads", "swa_num_key_value_heads"),
            *("index_n_heads", "linear_num_key_heads", "linear_num_value_heads"),
            *("o_groups", "hc_mult"),
            *("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"),
            *("num_shared_experts", "first_k_dense_replace", "num_dense_layers", "pretraining_tp"),
        ),
        1,
    ),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "index_topk"), 4),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers", "pad_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": WORDS,
    "unpadded_vocab_size": WORDS,
    "max_position_embeddings": 64,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "mlp_layer_types": ["dense", "sparse"],
    "mlp_only_layers": [],
    "use_cache": False,
    "enable_moe_block": True,
}
"""Of these a configuration gets what it has itself."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}

OTHERWISE: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 8],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "gemma4": {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8},
    "glm4v_moe": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a folder's configuration must have otherwise."""


def folders() -> list[str]:
    """Find the folders of transformers whose experts have exchangeable implementations."""
    import transformers

    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    decorated = [x for x in files if "\n@use_experts_implementation" in x.read_text()]
    return sorted({file.parent.name for file in decorated})


def import_folder(folder: str) -> Any:
    """Import the models of ``folder``, here and in the server of ranks."""
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def is_decorated(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "_apply_gate")


def _classes_of(folder: str) -> list[Any]:
    """Choose a model for each kind of configuration that has experts itself.

    One with a head for words, else the text model. Models of pictures and words have experts there.
    """
    module = import_folder(folder)
    found: dict[type, list[tuple[int, str, Any]]] = {}
    for name, kind in vars(module).items():
        config = getattr(kind, "config_class", None)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(config)):
            continue
        if kind.__module__ != module.__name__ or "PreTrained" in name or "Vision" in name:
            continue
        names = {field.name for field in dataclasses.fields(config)}
        has = names & {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
        ends = [name.endswith(end) for end in ("ForCausalLM", "TextModel", "Model")]
        if has and any(ends):
            found.setdefault(config, []).append((ends.index(True), name, kind))
    return [min(kinds, key=lambda entry: entry[:2])[2] for kinds in found.values()]


def tiny(folder: str, number: int = 0, **more: Any) -> Any:
    """Build a model of ``folder`` in float64, in training, each parameter moved off its start."""
    kind = _classes_of(folder)[number]
    names = {field.name for field in dataclasses.fields(kind.config_class)}
    given = {key: value for key, value in TINY.items() if key in names}
    if "kv_lora_rank" in names:  # a head of keys and values for each of queries
        given["num_key_value_heads"] = given["num_attention_heads"]
    config = kind.config_class(**{**given, **OTHERWISE.get(folder, {}), **more})
    torch.manual_seed(0)
    model = kind(config).double().train()
    with torch.no_grad():
        for name in experts_in(model):  # some folders leave theirs as memory was
            for parameter in model.get_submodule(name).parameters():
                parameter.zero_()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def experts_in(model: nn.Module) -> list[str]:
    """Name the modules of experts."""
    return [name for name, module in model.named_modules() if is_decorated(type(module))]


def over_experts(model: Any, **settings: Any) -> Any:
    """Split the experts of ``model`` over all ranks."""
    mesh = expert_mesh()
    plan = dict.fromkeys(experts_in(model), ExpertParallel(**settings))
    return parallelize_module(model, mesh["expert"], plan)


def plain_and_split(
    folder: str, *, dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[Any, Any]:
    """A model as one process has it, and the same with its experts split."""
    one = tiny(folder, **more).to(dtype)
    many = over_experts(copy.deepcopy(one))
    one.set_experts_implementation("eager")  # the default raises in float64
    return one, many


def words(batch: int = BATCH) -> torch.Tensor:
    """Tokens, equal on all ranks, without those that begin, end or fill."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, WORDS, (batch, LENGTH), generator=generator)


def share(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    world = comm.communicator()
    return x.chunk(world.size)[world.rank]


def trained(model: Any, ids: torch.Tensor, over: int = 1) -> torch.Tensor:
    """One forward and backward, whose loss is divided by ``over``; the logits."""
    with wide():
        found = model(input_ids=ids, labels=ids)
        (found.loss / over).backward()
    return found.logits.detach()


def _called(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":  # asks for embeddings of its own
        return model(inputs_embeds=model.get_input_embeddings()(ids))[0]
    return model(input_ids=ids)[0]


def check_sum(folder: str) -> None:
    """Compare a forward and backward, without a loss of the model's own, of each kind of model."""
    ids, generator = words(), torch.Generator().manual_seed(1)
    weigh = torch.randn(*ids.shape, 64, dtype=torch.float64, generator=generator)
    seen = set()
    for number in range(len(_classes_of(folder))):
        one, many = plain_and_split(folder, number=number)
        with wide():
            whole, part = _called(one, ids), _called(many, share(ids))
            for found, by in ((whole, weigh), (part, share(weigh))):
                (found * by[..., : found.shape[-1]]).sum().backward()
        close(part.detach(), share(whole.detach()))
        check_gradients(one, many)
        seen |= {type(one.get_submodule(name)) for name in experts_in(one)}
    # Those that the folder has from another are checked there.
    every = filter(is_decorated, vars(import_folder(folder)).values())
    assert seen == {kind for kind in every if kind.__module__.split(".")[2] == folder}


def close(
    found: torch.Tensor, expected: torch.Tensor, name: str = "outputs", by: float = CLOSE
) -> None:
    """Compare two tensors; elements may differ ``by`` a part of the largest one."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=0, atol=max(by * largest, FLOOR), msg=lambda text: f"{name}: {text}"
    )


def own(gradient: torch.Tensor) -> torch.Tensor:
    """The whole gradient: of experts from all ranks, of others the sum of the ranks' summands."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    found = gradient.clone()
    comm.communicator().all_reduce(found).wait()
    return found


def check_gradients(one: nn.Module, many: nn.Module, by: float = CLOSE) -> None:
    """Compare the gradient of every parameter; two or more of them are of experts."""
    experts = 0
    for (name, whole), mine in zip(one.named_parameters(), many.parameters(), strict=True):
        assert (whole.grad is None) == (mine.grad is None), name
        if whole.grad is not None and mine.grad is not None:
            assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), name
            experts += isinstance(mine, DTensor) and bool(whole.grad.any())
            close(own(mine.grad), whole.grad, name, by)
    assert experts > 1
