"""Bytes of each rank of axis pipeline, by category.

States: Rajbhandari et al. 2020, arXiv 1910.02054. Activations: Korthikanti et al. 2022, arXiv
2205.05198, here with grouped keys, gated feed-forwards and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.layouts import RunLayout, Software, rank_layers, rank_parameters
from meshwright.planner.shapes import ModelShape

__all__ = ["RankMemory", "flights", "rank_memory"]

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at its peak."""

    rank: int
    """Its place on axis pipeline."""
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The category with the most bytes."""
        return max(self.parts, key=lambda name: self.parts[name])


def flights(layout: RunLayout, rank: int) -> float:
    """Microbatches of one stage whose activations the stages of ``rank`` hold together."""
    p, v, m = layout.pipeline, layout.chunks, layout.microbatches
    if p == 1:
        return 1
    name = layout.schedule
    if name in ("gpipe", "loopedbfs"):
        return m * v
    if v > 1 and name == "interleaved1f1b":
        return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    if name == "zb1p":
        return min(m, p)
    if name == "zb2p":
        return min(m, 2 * p - 1)
    if name in ("zbv", "dualpipev"):
        return min(2 * m, 2 * p)
    return min(m, p - rank)


def layer_activations(
    shape: ModelShape, layout: RunLayout, software: Software, *, moe: bool, recompute: str
) -> float:
    """Bytes that one layer keeps of one microbatch for its backward."""
    h, t = shape.hidden, layout.tensor
    n = layout.tokens(shape)
    whole = t if layout.sequence else 1
    if recompute == "full":
        return 2.0 * n * h / whole
    dropout = software.dropout
    # Inputs of products are kept in the bytes of the product.
    kept_bytes = max(1, layout.bytes)
    between = n * h * (4.0 + 2.0 * kept_bytes + (2.0 if dropout else 0.0)) / whole
    q = shape.heads * shape.head
    rotated = q + shape.keys if software.eager else 0
    attention = 2.0 * n * (q + 2 * shape.keys + shape.values + rotated) / t
    if shape.kv_rank:
        attention = 2.0 * n * (2 * q + 2 * shape.values) / t
        between += 2.0 * n * (shape.q_rank + shape.kv_rank) * 2
    scores = 0.0
    if not software.flash and recompute != "selective":
        each = 5.0 if dropout else 2.0
        scores = each * shape.heads / t * n * shape.seq
    per_value = (2.0 if software.eager and shape.glu else 0.0) + (4.0 if shape.glu else 2.0) + kept_bytes
    if recompute == "selective" and software.flash:
        # Norms and activation functions are computed again.
        between -= n * h * 2.0 * kept_bytes / whole
        per_value -= kept_bytes
    forward = per_value * n * shape.ffn / t
    if moe:
        routed = n * shape.topk / whole
        forward = routed * (per_value * shape.moe_ffn + 4.0 * h) + 4.0 * n * shape.experts / whole
        forward += per_value * n * shape.shared_ffn / t
    if recompute == "operators":
        # Every second product and attention are kept, and the layer's input.
        kept = 2.0 * n * (shape.values + 0.5 * (q + 2 * shape.keys) + 0.5 * 2 * shape.ffn) / t
        return kept + n * h * 4.0 / whole
    return between + attention + scores + forward


def rank_memory(
    shape: ModelShape, layout: RunLayout, software: Software, rank: int | None = None
) -> RankMemory:
    """Bytes of ``rank`` of axis pipeline, or of the rank that needs the most."""
    if rank is None:
        p = layout.pipeline
        ranks = {0, min(1, p - 1), p - 1}
        return max((rank_memory(shape, layout, software, r) for r in ranks), key=lambda m: m.total)
    p, t, h = layout.pipeline, layout.tensor, shape.hidden
    n, vocab = layout.tokens(shape), shape.vocab * h / t
    layers_dense, layers_moe = rank_layers(shape, layout, rank)
    dense, expert = rank_parameters(shape, layout, rank)
    ranks = layout.data * layout.context
    shards = ranks if layout.zero else 1
    experts = max(1.0, shards / layout.expert)
    kept = dense / shards + expert / experts
    units = 0.0
    if layout.zero == 3:
        shards = layout.shard * layout.context
        kept = dense / shards + expert / max(1.0, shards / layout.expert)
        weights, gradients, moments = 4.0 * kept, 4.0 * kept, 8.0 * kept
        if layout.pipeline > 1:
            # Between microbatches weights stay gathered and gradients whole.
            units = (2.0 + software.reduce_bytes) * (dense + expert)
        else:
            unit = (shape.moe_parameters if shape.moe_layers else shape.dense_parameters) / t
            unit += shape.expert_parameters / layout.expert if shape.moe_layers else 0.0
            units = 4.0 * unit + (2.0 + software.reduce_bytes) * max(unit, vocab)
    else:
        each = float(software.gradient_bytes)
        sharded = layout.zero == 2 and layout.shard > 1
        weights, gradients = 2.0 * (dense + expert), each * (kept if sharded else dense + expert)
        moments = 12.0 * kept
    share = layout.recompute_share if layout.recompute != "none" else 0.0
    flying = flights(layout, rank) / layout.chunks + layout.extra_flights
    activations = live = 0.0
    for count, moe in ((layers_dense, False), (layers_moe, True)):
        if not count:
            continue
        kept = layer_activations(shape, layout, software, moe=moe, recompute=layout.recompute)
        whole = layer_activations(shape, layout, software, moe=moe, recompute="none")
        activations += count * flying * (share * kept + (1 - share) * whole if share else whole)
        live = max(live, whole if layout.recompute in ("full", "operators") else 0.0)
    if not software.flash:
        live += 4.0 * shape.heads / t * n * shape.seq  # scores in fp32
    logits = 0.0
    is_first, is_last = rank == 0, rank == p - 1
    if is_last or layout.vocabulary == "spread":
        spread = p if layout.vocabulary == "spread" else 1
        logits = software.logits_bytes * n * shape.vocab / t / spread
    embed = 2.0 * n * h * min(layout.microbatches, p) if is_first and p > 1 else 0.0
    return RankMemory(
        rank,
        {
            "weights": weights,
            "gradients": gradients,
            "optimizer": moments,
            "units": units,
            "activations": activations + live + embed,
            "logits": logits,
            "workspace": software.workspace_gib * GIB,
        },
    )
