"""Names inside of `meshwright.context_parallel`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.context_parallel": "attention, heads, own_loop, ring",
        "meshwright.context_parallel.heads": "attention_by_heads",
        "meshwright.context_parallel.masks": "MaskWords",
        "meshwright.context_parallel.ring": (
            "ring_attention, _attend as attend_keys, _attend_backward as attend_keys_backward, "
            "_blocks as plan_blocks"
        ),
        "meshwright.context_parallel.split": (
            "ContextSplit, RowSplit, SplitMethod, document_lengths, work_of"
        ),
    }
)
