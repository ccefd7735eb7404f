"""The sizes of a decoder: all that the planner knows of a model."""

from __future__ import annotations

import json
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
    dropout: bool = False
    """GPT's masks of dropout are kept for the backward."""
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
            limit = {"layers": 100_000, "frozen": 1}.get(name, LIMIT)
            if isinstance(value, int | float) and name != "saved" and not 0 <= value <= limit:
                raise PlanError(f"{name}: expected 0 to {limit:,}, found {value:,}")
        if not self.head_dim and self.hidden < self.heads:
            raise PlanError(f"heads: expected at most {self.hidden} (hidden), found {self.heads}")
        if self.heads % (self.kv_heads or 1):
            raise PlanError(
                f"kv_heads: expected a divisor of {self.heads} (heads), found {self.kv_heads}"
            )
        if self.experts and not 0 < self.topk <= self.experts:
            raise PlanError(f"topk: expected 1 to {self.experts} (experts), found {self.topk}")
        if self.experts and not self.moe_ffn:
            raise PlanError("moe_ffn: expected the feed-forward size of an expert, found 0")

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
        "heads": ("num_attention_heads", "n_head", "n_heads"),
        "kv_heads": ("num_key_value_heads", "num_kv_heads"),
        "head_dim": ("qk_nope_head_dim", "head_dim"),
        "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        "vocab": ("vocab_size",),
        "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        "tied": ("tie_word_embeddings",),
        "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
        "topk": ("num_experts_per_tok",),
        "moe_ffn": ("moe_intermediate_size", "intermediate_size"),
        "shared_ffn": ("shared_expert_intermediate_size",),
        "dense_layers": ("first_k_dense_replace",),
        "q_rank": ("q_lora_rank",),
        "kv_rank": ("kv_lora_rank",),
        "rope_dim": ("qk_rope_head_dim",),
        "v_dim": ("v_head_dim",),
    }
)
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "codegen")


def model_shape(path: str, seq: int | None = None) -> ModelShape:
    """Read a model's TOML or Hugging Face config.json; raises ``PlanError`` with the field."""
    if path.endswith(".toml"):
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
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    kind = str(config.get("model_type", "model"))
    found: dict[str, object] = {"name": kind, "glu": kind not in _UNGATED}
    for name, keys in _NAMES.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            found[name] = value
    hidden = found.get("hidden")
    found.setdefault("ffn", 4 * hidden if isinstance(hidden, int) else 1)
    if not found.get("experts"):
        for name in ("experts", "topk", "moe_ffn", "shared_ffn", "dense_layers"):
            found.pop(name, None)
    shared, each = config.get("n_shared_experts"), found.get("moe_ffn")
    if "shared_ffn" not in found and isinstance(shared, int) and isinstance(each, int):
        found["shared_ffn"] = shared * each
    if seq is not None:
        found["seq"] = seq
    missing = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in found]
    if missing:
        keys = " or ".join(_NAMES[missing[0]])
        close = nearest(_NAMES[missing[0]][0], list(config))
        hint = f"; did you mean '{close}'?" if close else ""
        raise PlanError(f"expected {keys} (the model's {missing[0]}){hint}", source)
    return read_tree(found, ModelShape, source=source)
