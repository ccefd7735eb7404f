"""How a run lays a model over its GPUs, and what its software does: the planner's question."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from meshwright.axes import KNOWN_AXES
from meshwright.planner.shapes import ModelShape
from meshwright.schedule.builders import V_SHAPED


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """Degrees of a run; ranks are laid out with axis tensor innermost, as ``KNOWN_AXES``."""

    replicate: int = 1
    shard: int = 1
    zero: int = 0
    """What data ranks share: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights."""
    tensor: int = 1
    sequence: bool = False
    """Axis tensor also splits what is between its layers, by sequence."""
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    micro: int = 1
    """Sequences of a microbatch."""
    microbatches: int = 1
    bytes: int = 2
    """Of a number in matrix products: 2 bf16, 1 fp8, 0 fp4."""
    recompute: str = "none"
    """Whole layers (full), what is cheap (selective: scores, or norms and activation functions), or
    every second product and all between (operators)."""
    recompute_share: float = 1.0
    """Share of the layers that recompute."""
    extra_flights: float = 0.0
    """Microbatches whose activations each stage holds beyond its schedule's."""
    vocabulary: str = "last"
    """Where the output layer is: on the last stage, balanced by fewer layers there, or spread."""

    @cached_property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @cached_property
    def is_fully_sharded(self) -> bool:
        """Whether weights are gathered when they are needed."""
        return self.zero == 3 or (self.zero == 2 and self.shard > 1 and self.pipeline == 1)

    @cached_property
    def sharers(self) -> int:
        """Ranks that share one optimizer."""
        whole = self.shard if self.is_fully_sharded else self.data
        return whole * self.context if self.zero else 1

    def kept(self, dense: float, expert: float) -> float:
        """What a rank keeps of so many parameters that it shares with others."""
        return dense / self.sharers + expert / max(1.0, self.sharers / self.expert)

    def recomputed(self, layers: int) -> int:
        """Of so many layers of a stage, those that are recomputed whole: its first."""
        share = self.recompute_share if self.recompute == "full" else 0.0
        return math.ceil(share * layers - 1e-9)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of our plan, in which ranks of axis expert are not those of another data axis.

        Where axis shard has several ranks, other parameters are shared over axis expert, too.
        """
        sizes = {name: getattr(self, name) for name in KNOWN_AXES}
        sizes["shard" if self.shard > 1 else "replicate"] //= self.expert
        return {name: size for name, size in sizes.items() if size > 1}

    @cached_property
    def gpus(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @cached_property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.micro * self.microbatches * self.data

    def tokens(self, shape: ModelShape) -> int:
        """Tokens of a microbatch on one rank."""
        return self.micro * math.ceil(shape.seq / self.context)

    @cached_property
    def stages(self) -> int:
        return self.pipeline * self.chunks


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training program does, apart from the layout: facts of its release.

    `workspace_gib` and `fragments` are its overhead, from the memory that its runs print.
    """

    flash: int = 2
    """Attention without a stored matrix of scores: FlashAttention 1 or 2, or 3 where the kernel was
    made for the generation of the GPU; 0: scores are stored."""
    overlap_data: bool = True
    overlap_tensor: bool = False
    """Products are cut so that their collectives run beside them."""
    overlap_back: bool = False
    """Weights' gradients are computed beside the collectives of inputs' gradients."""
    compiled: bool = False
    """Elementwise chains are single kernels."""
    reduce_bytes: int = 4
    all_reduces: bool = False
    """Ranks that share an optimizer each receive all gradients, as DeepSpeed's ZeRO-1 does."""
    blocking_transfers: bool = False
    """A stage waits for its messages instead of computing beside them."""
    split_transfers: bool = True
    """Ranks of axis tensor send a part of a message each."""
    parallel_block: bool = False
    """Attention and feed-forward read one input, and their outputs are summed together."""
    fused_accumulation: bool = True
    """Products add to the kept gradients themselves."""
    deterministic: bool = False
    """Attention's backward adds in one order."""
    rowwise: bool = False
    """fp8 numbers are scaled by row, not by tensor."""
    balanced: bool = False
    """The last stage has fewer layers, by the work of its output layer."""
    dropout: bool = False
    logits_bytes: int = 10
    """Of one logit at the peak: a 16-bit one, its fp32 copy, and its fp32 gradient."""
    whole_logits: bool = False
    """Each rank of axis tensor gathers all logits."""
    traced_stages: bool = False
    """Stages of a pipeline are graphs without modules that could recompute."""
    eager: bool = False
    """Gates and rotations are operators of their own, and keep their results."""
    gradient_bytes: int = 4
    """Of a gradient as it is kept and summed, by replicas."""
    workspace_gib: float = 0.0
    """Scratch memory of its libraries: of products and of attention."""
    fragments: float = 0.0
    """Share by which what is reserved exceeds what is allocated, where printed memory counts it."""


LAYER_LISTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("gpt2", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "falcon", "bloom"),
            "transformer.h",
        ),
        **dict.fromkeys(("bert", "bert-generation", "megatron-bert"), "bert.encoder.layer"),
        **dict.fromkeys(
            ("camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"), "roberta.encoder.layer"
        ),
        "biogpt": "biogpt.layers",
        "data2vec-text": "data2vec_text.encoder.layer",
        "ernie": "ernie.encoder.layer",
        "gpt_neox": "gpt_neox.layers",
        "gpt_neox_japanese": "gpt_neox_japanese.layers",
        "mpt": "transformer.blocks",
        "opt": "model.decoder.layers",
        "roberta-prelayernorm": "roberta_prelayernorm.encoder.layer",
        "roformer": "roformer.encoder.layer",
    }
)
"""The list of layers in Hugging Face's models, by type, where it is not ``model.layers``."""
_RULES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "gpt2", "gpt_neox")


_WITHOUT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("bitnet", "modernbert-decoder", "persimmon", "stablelm", "xglm"), "tensor"
        ),
        **dict.fromkeys(("mpt", "falcon"), "context"),
        "bloom": "context pipeline",
        "llama4_text": "expert",
    }
)
"""Axes that cannot cut Hugging Face's models of a type: they carry no rules, add positions to their
masks, or have a backward or experts of their own kind."""


def can_cut(shape: ModelShape, axis: str) -> bool:
    """Whether models of the type can be cut over the axis."""
    has_rules = axis != "tensor" or shape.name in _RULES or shape.name not in LAYER_LISTS
    return has_rules and axis not in _WITHOUT.get(shape.name, "").split()


def tensor_rules(shape: ModelShape) -> str | None:
    """The rules of axis tensor: a set of ours, or the model's own; None: there are none."""
    if shape.name in _RULES:
        return shape.name
    return "model" if can_cut(shape, "tensor") else None


def stage_layers(shape: ModelShape, layout: RunLayout, head: float = 0.0) -> list[int]:
    """Layers of each stage; ``head`` is the output layer's work in layers, where it counts.

    Where two layers are missing to equal stages, the first and the last have one less, as the
    published ones; else the earliest stages have one more.
    """
    stages, layers = layout.stages, shape.layers
    if layout.vocabulary == "balanced" and stages > 1:
        mean = (layers + head) / stages
        last = max(0, round(mean - head))
        if last * stages < layers:
            each, more = divmod(layers - last, stages - 1)
            return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)] + [last]
    each, more = divmod(layers, stages)
    if more == stages - 2 and stages > 2:
        return [each] + [each + 1] * (stages - 2) + [each]
    return [each + (stage < more) for stage in range(stages)]


def rank_stages(layout: RunLayout, rank: int) -> tuple[int, ...]:
    """Stages of one rank of axis pipeline."""
    if layout.schedule in V_SHAPED:
        return rank, 2 * layout.pipeline - 1 - rank
    return tuple(range(rank, layout.stages, layout.pipeline))


def rank_layers(shape: ModelShape, layout: RunLayout, rank: int) -> tuple[int, int]:
    """Layers of one rank of axis pipeline: without experts, and with."""
    dense = moe = 0
    own = rank_stages(layout, rank)
    left = shape.layers - shape.moe_layers
    head = shape.vocab * shape.hidden / max(1, shape.dense_parameters)
    for stage, count in enumerate(stage_layers(shape, layout, head)):
        first = min(left, count)
        left -= first
        if stage in own:
            dense, moe = dense + first, moe + count - first
    return dense, moe


def rank_parameters(shape: ModelShape, layout: RunLayout, rank: int) -> tuple[float, float]:
    """Parameters of one rank of axis pipeline, whole over data axes: dense ones, and experts'."""
    layers, moe = rank_layers(shape, layout, rank)
    dense = layers * shape.dense_parameters + moe * shape.moe_parameters
    vocab, p = shape.vocab * shape.hidden, layout.pipeline
    if layout.vocabulary == "spread":
        dense += 2 * vocab // p
    elif p == 1:
        dense += vocab * (1 if shape.tied else 2)
    else:
        own = rank_stages(layout, rank)
        dense += vocab * ((0 in own) + (layout.stages - 1 in own))
    return dense / layout.tensor, moe * shape.expert_parameters / layout.expert
