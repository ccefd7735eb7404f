"""Bytes of each rank of axis pipeline, by category.

States: Rajbhandari et al. 2020, arXiv 1910.02054. Activations: Korthikanti et al. 2022, arXiv
2205.05198, here with grouped keys, gated feed-forwards and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.layouts import (
    RunLayout,
    Software,
    rank_layers,
    rank_parameters,
    rank_stages,
)
from meshwright.planner.shapes import ModelShape

GIB = 2.0**30
USABLE = 0.94
"""Share of a GPU's memory that a run can have: the rest is the driver's and the collectives'."""


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


def flights(schedule: str, p: int, chunks: int, microbatches: int, rank: int) -> int:
    """Activations of stages that ``rank`` of ``p`` holds at most: one for each microbatch in one.

    As the builders' schedules hold them; ZB-2p as Qi et al. 2024, arXiv 2401.10241.
    """
    m = microbatches
    if p == 1:
        return chunks
    if schedule in ("gpipe", "loopedbfs"):
        return m * chunks
    if schedule == "interleaved1f1b" and chunks > 1:
        group = m // max(1, m // p)
        return min(m * chunks, 2 * (p - rank - 1) + (chunks - 1) * group + 1)
    if schedule == "zb1p":
        return min(m, p)
    if schedule == "zb2p":
        return min(m, 2 * p - 1)
    if schedule in ("zbv", "dualpipev"):
        return min(2 * m, 2 * p + (schedule == "dualpipev"))
    if schedule in ("vhalf", "vmin"):
        return min(2 * m, 2 * (p // 2 + 1 if schedule == "vhalf" else (p + 4) // 3))
    return min(m, p - rank)


def layer_activations(
    shape: ModelShape, layout: RunLayout, software: Software, *, moe: bool, recompute: str
) -> float:
    """Bytes that one layer keeps of one microbatch for its backward."""
    h, t = shape.hidden, layout.tensor
    n = layout.tokens(shape)
    whole = t if layout.sequence else 1
    if recompute == "full":
        return n * (shape.least or 2.0 * h / whole)
    if shape.saved:
        return shape.saved * n / t
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
    per_value = (
        (2.0 if software.eager and shape.glu else 0.0) + (4.0 if shape.glu else 2.0) + kept_bytes
    )
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


def states(
    shape: ModelShape, layout: RunLayout, software: Software, dense: float, expert: float
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer of ``dense`` and ``expert`` parameters of a rank.

    ``units``: whole weights and gradients of sharded layers, while they are needed.
    """
    kept = layout.kept(dense, expert)
    trained = 1 - shape.frozen
    if layout.is_fully_sharded:
        if layout.pipeline > 1:
            # Between microbatches weights stay gathered and gradients whole.
            units = (2.0 + software.reduce_bytes) * (dense + expert)
        else:
            moe = bool(shape.moe_layers)
            unit = (shape.moe_parameters if moe else shape.dense_parameters) / layout.tensor
            unit += shape.expert_parameters / layout.expert if moe else 0.0
            vocab = shape.vocab * shape.hidden / layout.tensor
            ahead = 2.0 * (dense + expert) if layout.zero == 2 else 4.0 * unit
            units = ahead + (2.0 + software.reduce_bytes) * max(unit, vocab)
        return {
            "weights": 4.0 * kept,
            "gradients": 4.0 * kept * trained,
            "optimizer": 8.0 * kept * trained,
            "units": units,
        }
    is_sharded = layout.zero == 2 and layout.shard > 1
    return {
        "weights": 2.0 * (dense + expert),
        "gradients": software.gradient_bytes * trained * (kept if is_sharded else dense + expert),
        "optimizer": (4.0 + 8.0 * trained) * kept,
    }


def rank_memory(
    shape: ModelShape, layout: RunLayout, software: Software, rank: int | None = None
) -> RankMemory:
    """Bytes of ``rank`` of axis pipeline, or of the rank that needs the most."""
    if rank is None:
        p = layout.pipeline
        ranks = {0, min(1, p - 1), p - 1}
        return max((rank_memory(shape, layout, software, r) for r in ranks), key=lambda m: m.total)
    p, t, h = layout.pipeline, layout.tensor, shape.hidden
    n = layout.tokens(shape)
    layers_dense, layers_moe = rank_layers(shape, layout, rank)
    dense, expert = rank_parameters(shape, layout, rank)
    found = states(shape, layout, software, dense, expert)
    own = rank_stages(layout, rank)
    share = layout.recompute_share if layout.recompute != "none" else 0.0
    flying = layout.extra_flights + (
        flights(layout.schedule, p, layout.chunks, layout.microbatches, rank) / layout.chunks
    )
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
    is_first, is_last = 0 in own, layout.stages - 1 in own
    if is_last or layout.vocabulary == "spread":
        spread = p if layout.vocabulary == "spread" else 1
        logits = software.logits_bytes * n * shape.vocab / spread
        logits /= 1 if software.whole_logits else t
    embed = 2.0 * n * h * min(layout.microbatches, p) if is_first and p > 1 else 0.0
    found["activations"] = activations + live + embed
    found["logits"] = logits
    found["workspace"] = software.workspace_gib * GIB
    return RankMemory(rank, found)
