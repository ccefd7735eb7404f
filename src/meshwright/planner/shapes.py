"""The sizes of a decoder: all that the planner knows of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from meshwright.errors import PlanError
from meshwright.settings import AtLeast, nearest
from meshwright.toml_source import read_file, read_tree

Size = Annotated[int, AtLeast(1)]
Count = Annotated[int, AtLeast(0)]

LIMIT = 1_000_000_000
"""Sizes above it are mistakes; their products would not be numbers of bytes."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder, dense or with experts."""

    name: str = "model"
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Count = 0
    """0: as many as `heads`."""
    head_dim: Count = 0
    """0: `hidden` / `heads`."""
    ffn: Size
    glu: bool = True
    """Three matrices in a feed-forward; without, two."""
    vocab: Size
    seq: Size
    tied: bool = False
    """The embedding is also the output layer."""
    experts: Count = 0
    topk: Count = 0
    moe_ffn: Count = 0
    shared_ffn: Count = 0
    dense_layers: Count = 0
    """The first layers, which have no experts."""
    q_rank: Count = 0
    """Latent attention: ranks of queries and of keys and values, and parts of a head."""
    kv_rank: Count = 0
    rope_dim: Count = 0
    v_dim: Count = 0
    window: Count = 0
    """Keys that each second layer sees; 0: all."""
    saved: Annotated[float, AtLeast(0)] = 0.0
    """Bytes that a layer keeps of one token, as traced; 0: by formula."""
    least: Count = 0
    """The same of a layer that is recomputed."""
    frozen: Annotated[float, AtLeast(0)] = 0.0
    """Share of the parameters that do not train."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            limit = {"layers": 100_000, "saved": 1e15, "frozen": 1}.get(name, LIMIT)
            is_number = isinstance(value, int | float if name in ("saved", "frozen") else int)
            least = int(name in ("layers", "hidden", "heads", "ffn", "vocab", "seq"))
            if name != "name" and not (is_number and least <= value <= limit):
                raise PlanError(f"{name}: expected {least} to {limit:,}, found {value}")
        if not self.head_dim and self.hidden % self.heads:
            raise PlanError(f"heads: expected to divide {self.hidden} (hidden), found {self.heads}")
        if self.heads % (self.kv_heads or 1):
            raise PlanError(
                f"kv_heads: expected a divisor of {self.heads} (heads), found {self.kv_heads}"
            )
        if self.experts and not 0 < self.topk <= self.experts:
            raise PlanError(f"topk: expected 1 to {self.experts} (experts), found {self.topk}")
        if self.experts and not self.moe_ffn:
            raise PlanError("moe_ffn: expected the feed-forward size of an expert, found 0")
        if self.dense_layers > self.layers:
            raise PlanError(
                f"dense_layers: expected at most {self.layers} (layers), found {self.dense_layers}"
            )

    @cached_property
    def head(self) -> int:
        """Size of a head of queries."""
        return (self.head_dim or self.hidden // self.heads) + self.rope_dim

    @cached_property
    def values(self) -> int:
        """All heads' outputs of attention."""
        return self.heads * (self.v_dim or self.head)

    @cached_property
    def keys(self) -> int:
        """Key-value heads times their size."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @cached_property
    def projections(self) -> tuple[tuple[int, int, bool], ...]:
        """(Inputs, outputs, split by axis tensor) of attention's matrices."""
        h, q = self.hidden, self.heads * self.head
        if not self.kv_rank:
            return ((h, q + 2 * self.keys, True), (self.values, h, True))
        down = (h, (self.q_rank or 0) + self.kv_rank + self.rope_dim, False)
        up = self.heads * (self.head - self.rope_dim + (self.v_dim or self.head))
        return (down, (self.q_rank or h, q, True), (self.kv_rank, up, True), (self.values, h, True))

    @cached_property
    def matrices(self) -> int:
        """Matrices of hidden x ffn in a feed-forward."""
        return 3 if self.glu else 2

    @cached_property
    def attention_parameters(self) -> int:
        return sum(rows * columns for rows, columns, _ in self.projections)

    @cached_property
    def dense_parameters(self) -> int:
        """Of a layer without experts."""
        return self.attention_parameters + self.matrices * self.hidden * self.ffn + self.norms

    @cached_property
    def norms(self) -> int:
        return 2 * self.hidden * (1 if self.glu else 2) + (0 if self.glu else 4 * self.hidden)

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of a layer."""
        return self.experts * self.matrices * self.hidden * self.moe_ffn

    @cached_property
    def moe_parameters(self) -> int:
        """Of a layer with experts, without these."""
        shared = self.matrices * self.hidden * self.shared_ffn
        return self.attention_parameters + shared + self.hidden * self.experts + self.norms

    @cached_property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        moe = self.moe_layers * (self.moe_parameters + self.expert_parameters)
        dense = (self.layers - self.moe_layers) * self.dense_parameters
        return moe + dense + self.vocab * self.hidden * (1 if self.tied else 2)

    @cached_property
    def active_ffn(self) -> float:
        """Feed-forward size that a token passes, as the mean of the layers."""
        moe = self.topk * self.moe_ffn + self.shared_ffn
        share = self.moe_layers / self.layers
        return share * moe + (1 - share) * self.ffn

    @cached_property
    def core_flops(self) -> float:
        """Operations of scores and values in a layer's forward for one token."""
        return 2.0 * self.seq * self.heads * (self.head + (self.v_dim or self.head))

    @cached_property
    def layer_flops(self) -> float:
        """Operations of a layer's forward for one token, as the mean of the layers.

        Narayanan et al. 2021, arXiv 2104.04473.
        """
        products = self.attention_parameters + self.matrices * self.hidden * self.active_ffn
        return 2 * products + self.core_flops

    @cached_property
    def flops(self) -> float:
        """Operations of the model's forward for one token."""
        return self.layers * self.layer_flops + 2 * self.vocab * self.hidden


# Keys of a Hugging Face config.json, by our names; the first that is there counts.
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "hidden": ("hidden_size", "n_embd", "d_model"),
        "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
        "head_dim": ("qk_nope_head_dim", "head_dim"),
        "ffn": (
            "intermediate_size_mlp",
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
        ),
        "vocab": ("vocab_size",),
        "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        "tied": ("tie_word_embeddings",),
        "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        "topk": ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"),
        "moe_ffn": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
        "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
        "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "dense_layers": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
        "q_rank": ("q_lora_rank",),
        "kv_rank": ("kv_lora_rank",),
        "rope_dim": ("qk_rope_head_dim",),
        "v_dim": ("v_head_dim",),
        "window": ("sliding_window",),
        "act": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    }
)
# What no key says, by model_type; an activation without a gate says that there are two matrices.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "two matrices": "gpt2 gpt_neo gpt_neox gptj opt bloom mpt falcon codegen xglm nemotron",
        "three matrices": "bitnet modernbert-decoder gemma gemma2 gemma3_text vaultgemma",
        "tied unless told": "bert bert-generation biogpt bloom camembert cohere cohere2 ernie "
        "cohere2_moe data2vec-text ernie4_5 ernie4_5_moe falcon gemma gemma2 gemma3_text gpt-sw3 "
        "gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa megatron-bert minicpm3 mpt opt "
        "modernbert-decoder roberta roberta-prelayernorm roformer smollm3 starcoder2 xglm youtu "
        "vaultgemma xlm-roberta xlm-roberta-xl",
        "other layers": "big_bird blt cpmant ctrl doge electra gemma3n gemma4_unified "
        "gemma4_unified_text git hrm_text hy_v4 jetmoe longcat_flash moshi openai-gpt rembert "
        "roc_bert rwkv xlm xlnet xlstm xmod",
    }
)
_OTHER_KEYS = re.compile(
    "mamba|ssm|state_size|lru_|conv_|linear_(attn|conv|key|num)|coder_layers|per_layer_input|d_kv|"
    "(text|vision|audio)_config"
)
_ATTENTION = re.compile("(full|sliding|chunked|indexed)_attention")


def model_shape(path: str | Path, seq: int | None = None) -> ModelShape:
    """Read a model's TOML or Hugging Face config.json; raises ``PlanError`` with the field."""
    if (path := str(path)).endswith(".toml"):
        shape = read_file(path, ModelShape)
        return shape if seq is None else read_tree({**vars(shape), "seq": seq}, ModelShape)
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"expected a model's .toml or config.json: {error}", path) from error
    if not isinstance(config, dict):
        raise PlanError(f"expected a JSON object, found {type(config).__name__}", path)
    return from_config(config, seq, path)


def from_config(config: Mapping[str, object], seq: int | None, source: str = "") -> ModelShape:
    """Take the sizes from a Hugging Face configuration; raises ``PlanError`` with the field."""
    inner = [config.get(part) for part in ("attn_config", "ffn_config")]
    parts = [part for part in (*inner, config) if isinstance(part, Mapping)]
    config = {key: part[key] for part in parts for key in part if part[key] is not None}
    kind = str(config.get("model_type", "model"))
    kinds = {what: names.split() for what, names in _KINDS.items()}
    types, feeds, dense = (
        value if isinstance(value := config.get(key), list) else []
        for key in ("layer_types", "mlp_layer_types", "mlp_only_layers")
    )
    is_other = kind in kinds["other layers"] or any(map(_OTHER_KEYS.search, config))
    is_other |= config.get("is_encoder_decoder") is True
    if is_other or not all(_ATTENTION.fullmatch(str(each)) for each in types):
        raise PlanError(
            f"model_type: the sizes of '{kind}' are not those of a decoder of equal layers; give "
            "package.module:function, which makes the model",
            source,
        )
    names = {name: next((k for k in keys if k in config), keys[0]) for name, keys in _NAMES.items()}
    found = {name: config[key] for name, key in names.items() if key in config}
    is_gated = re.search("silu|swi|glu", str(found.pop("act", "silu"))) is not None
    is_gated = is_gated and kind not in kinds["two matrices"]
    found |= {"name": kind, "glu": is_gated or kind in kinds["three matrices"]}
    found.setdefault("tied", kind in kinds["tied unless told"])
    hidden, layers = found.get("hidden"), found.get("layers")
    found.setdefault("ffn", 4 * hidden if isinstance(hidden, int) else 1)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    if config.get("use_sliding_window") is False or (types and "sliding_attention" not in types):
        found.pop("window", None)
    shared, each = found.pop("shared", int("intermediate_size_mlp" in config)), found.get("moe_ffn")
    if shared and "shared_ffn" not in found:
        found["shared_ffn"], names["shared_ffn"] = shared, names["shared"]
        if isinstance(shared, int) and isinstance(each, int):
            found["shared_ffn"] = shared * each
    step = config.get("decoder_sparse_step", config.get("interleave_moe_layer_step", 1))
    if isinstance(step, int) and isinstance(layers, int) and step > 1:
        found["dense_layers"] = layers - layers // step
    elif dense or "dense" in feeds:
        found["dense_layers"] = len(dense) or feeds.count("dense")
    if not found.get("experts"):
        for name in ("experts", "topk", "moe_ffn", "shared_ffn", "dense_layers"):
            found.pop(name, None)
    if seq is not None:
        found["seq"] = seq
    missing = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in found]
    if missing:
        keys = " or ".join(_NAMES[missing[0]])
        close = nearest(_NAMES[missing[0]][0], list(config))
        hint = f"; did you mean '{close}'?" if close else ""
        raise PlanError(f"expected {keys} (the model's {missing[0]}){hint}", source)
    try:
        return read_tree(found, ModelShape)
    except PlanError as error:
        theirs = [re.sub(r"\w+", lambda n: names.get(n[0], n[0]), p) for p in error.problems]
        raise PlanError(theirs, source) from None
