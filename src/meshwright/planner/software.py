"""What ours does, and the programs of published runs: facts of their releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.planner.layouts import Software

LAST_RANK = frozenset({"megatron_golden"})
"""Sources that print the memory of the last rank of axis pipeline."""

_MEGATRON_2021 = Software(
    flash=0,
    overlap_data=False,
    dropout=True,
    blocking_transfers=True,
    logits_bytes=6,
    fused_accumulation=False,
)
_MEGATRON_2022 = replace(_MEGATRON_2021, overlap_tensor=True, fused_accumulation=True)
_DEEPSPEED = replace(
    _MEGATRON_2021,
    reduce_bytes=2,
    all_reduces=True,
    gradient_bytes=2,
    workspace_gib=6.0,
    fragments=0.12,
)
_MEGATRON = Software(flash=3, logits_bytes=6, overlap_tensor=True, workspace_gib=1.0)
_FSDP = Software(
    fused_accumulation=False, logits_bytes=14, eager=True, workspace_gib=1.0, fragments=0.03
)
OURS = replace(_FSDP, whole_logits=True, split_transfers=False)
"""What a training by Meshwright does."""
SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        "megatron_sc21": _MEGATRON_2021,
        "korthikanti_2205_05198": _MEGATRON_2022,
        "vtrain_ground_truth": replace(_DEEPSPEED, overlap_back=True),
        "bloom_prequel": _DEEPSPEED,
        "zero_bubble_2401_10241": replace(
            _MEGATRON_2022, blocking_transfers=False, workspace_gib=1.0
        ),
        "vocab_parallel_2411_05288": replace(_MEGATRON_2022, flash=2, blocking_transfers=False),
        "megascale_2402_15627": _MEGATRON_2022,
        "torchtitan_2024_12": _FSDP,
        "torchtitan_asynctp_2025_06": replace(_FSDP, logits_bytes=6),
        "torchtitan_h200_2025_06": replace(_FSDP, logits_bytes=6),
        "torchtitan_a100_2024": _FSDP,
        "mpt_llm_foundry": replace(_FSDP, flash=1, logits_bytes=4),
        "fsdp_vldb_2304_11277": replace(_FSDP, reduce_bytes=2),
        "nanotron_ultrascale": Software(
            fused_accumulation=False,
            overlap_data=False,
            blocking_transfers=True,
            eager=True,
            balanced=True,
            gradient_bytes=6,
            workspace_gib=1.0,
            fragments=0.05,
        ),
    }
)


def software_of_row(source: str, extras: object, precision: str) -> Software:
    """What the program of a row does, by its source and extras; unknown ones as Megatron-Core."""
    found = SOFTWARE.get(source, _MEGATRON)
    said = extras if isinstance(extras, Mapping) else {}
    if said.get("attention") is not None:
        found = replace(found, flash=found.flash if said["attention"] == "flash" else 0)
    if "ddp" in said:
        found = replace(found, overlap_data=said["ddp"] != "local (no overlap)")
    if said.get("mp_mode") == "PURE":
        found = replace(found, reduce_bytes=2)
    if said.get("system") == "MegaScale":
        found = replace(
            found,
            flash=2,
            overlap_data=True,
            compiled=True,
            blocking_transfers=False,
            parallel_block=True,
        )
    return replace(
        found,
        compiled=found.compiled or bool(said.get("compile")),
        overlap_tensor=found.overlap_tensor or bool(said.get("async_tp")),
        deterministic=bool(said.get("deterministic")),
        rowwise="rowwise" in precision,
    )
