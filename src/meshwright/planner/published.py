"""Published runs: rows of a JSON file as questions to the planner, and the errors of its answers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware, hardware
from meshwright.planner.layouts import RunLayout, Software
from meshwright.planner.memory import rank_memory
from meshwright.planner.shapes import ModelShape
from meshwright.planner.steps import step_time

__all__ = ["Published", "published_runs", "software_of"]

_MACHINES = {
    "A100-80GB": "a100", "A100-40GB": "a100-40gb", "H100-80GB": "h100",
    "H100-96GB-HBM2e-500W": "h100-96gb-500w", "H200-141GB": "h200", "B200": "b200",
    "B300": "b300", "GB200": "gb200", "GB300": "gb300",
}
_PRODUCTS = {"fp16": 2, "bf16": 2, "nvfp4": 0}
_SCHEDULES = {"none": "1f1b", "1f1b": "1f1b", "zb1p": "zb1p", "zb2p": "zb2p"}

_MEGATRON_2021 = Software(
    flash=0, overlap_data=False, dropout=True, blocking_transfers=True, logits_bytes=6,
    fused_accumulation=False,
)
_MEGATRON_2022 = replace(_MEGATRON_2021, overlap_tensor=True, fused_accumulation=True)
_DEEPSPEED = replace(
    _MEGATRON_2021, split_transfers=False, reduce_bytes=2, gradient_bytes=2, workspace_gib=6.0,
    fragments=0.12,
)
_MEGATRON_CORE = Software(flash=3, logits_bytes=6, overlap_tensor=True, workspace_gib=1.0)
_FSDP = Software(
    fused_accumulation=False, logits_bytes=14, eager=True, workspace_gib=1.0, fragments=0.03)
_SOFTWARE: Mapping[str, Software] = {
    "megatron_sc21": _MEGATRON_2021,
    "korthikanti_2205_05198": _MEGATRON_2022,
    "vtrain_ground_truth": replace(_DEEPSPEED, split_transfers=True),
    "bloom_prequel": _DEEPSPEED,
    "zero_bubble_2401_10241": replace(_MEGATRON_2022, blocking_transfers=False, workspace_gib=1.0),
    "vocab_parallel_2411_05288": replace(_MEGATRON_2022, flash=2, blocking_transfers=False),
    "megascale_2402_15627": _MEGATRON_2022,
    "torchtitan_2024_12": _FSDP,
    "torchtitan_asynctp_2025_06": replace(_FSDP, logits_bytes=6),
    "torchtitan_h200_2025_06": replace(_FSDP, logits_bytes=6),
    "torchtitan_a100_2024": _FSDP,
    "mpt_llm_foundry": replace(_FSDP, flash=1),
    "fsdp_vldb_2304_11277": replace(_FSDP, reduce_bytes=2),
    "nanotron_ultrascale": Software(
        fused_accumulation=False,
        overlap_data=False, blocking_transfers=True, eager=True, gradient_bytes=6,
        workspace_gib=1.0, fragments=0.05,
    ),
}


def software_of(row: Mapping[str, Any]) -> Software:
    """What the program of a row is known to do: by its source, and by what the row says."""
    found = _SOFTWARE.get(row["source_id"], _MEGATRON_CORE)
    extras = row.get("extras") or {}
    attention = extras.get("attention")
    if attention is not None:
        found = replace(found, flash=found.flash if attention == "flash" else 0)
    if extras.get("compile"):
        found = replace(found, compiled=True)
    if "rowwise" in row["precision"]:
        found = replace(found, rowwise=True)
    if extras.get("async_tp"):
        found = replace(found, overlap_tensor=True)
    if extras.get("mp_mode") == "PURE":
        found = replace(found, reduce_bytes=2)
    if "ddp" in extras:
        found = replace(found, overlap_data=extras["ddp"] != "local (no overlap)")
    if extras.get("deterministic"):
        found = replace(found, deterministic=True)
    if extras.get("system") == "MegaScale":
        found = replace(
            found, flash=2, overlap_data=True, compiled=True, blocking_transfers=False,
            parallel_block=True,
        )
    if row["parallel"]["zero_stage"] == 3 and found.flash == 3:
        found = replace(found, reduce_bytes=2)
    return found


@dataclass(frozen=True, slots=True)
class Published:
    """One row, read."""

    id: str
    source: str
    tier: str
    shape: ModelShape
    hardware: Hardware
    layouts: tuple[RunLayout, ...]
    """What the row may mean where something is not published; the fastest that fits counts."""
    software: Software
    seconds: float | None
    memory_gib: float | None
    memory_kind: str
    fits: bool
    last_rank: bool


def published_runs(path: str) -> tuple[list[Published], int]:
    """Read a file of runs; returns the rows that the planner can express, and the number of rows."""
    try:
        tree = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"expected a JSON file of runs: {error}", path) from error
    rows = tree.get("rows") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        raise PlanError("rows: expected a list of runs", path)
    found = []
    for row in rows:
        run = _read(row)
        if run is not None:
            found.append(run)
    return found, len(rows)


def _read(row: Mapping[str, Any]) -> Published | None:
    model, hw, parallel, batch = row["model"], row["hw"], row["parallel"], row["batch"]
    if hw["gpu"] not in _MACHINES or parallel["tp"] is None:
        return None
    if row["kind"] == "layer_microbench":
        return None
    moe, mla = model.get("moe") or {}, model.get("mla") or {}
    shape = ModelShape(
        name=model["name"], layers=model["layers"], hidden=model["hidden"], heads=model["heads"],
        kv_heads=model["kv_heads"] or 0, head_dim=mla.get("qk_head_dim") or model["head_dim"] or 0,
        ffn=model["ffn"], glu=bool(model["glu"]), vocab=model["vocab"], seq=model["seq"],
        tied=bool(model["tied_embeddings"]),
        experts=moe.get("experts", 0), topk=moe.get("topk", 0), moe_ffn=moe.get("moe_ffn", 0),
        shared_ffn=moe.get("shared_ffn", 0), dense_layers=moe.get("dense_layers", 0),
        q_rank=mla.get("q_lora_rank", 0), kv_rank=mla.get("kv_lora_rank", 0),
        rope_dim=mla.get("qk_rope_dim", 0), v_dim=mla.get("v_head_dim", 0),
        window=model.get("sliding_window") or 0,
    )
    base = hardware_of(hw["gpu"])
    machine = replace(
        base, node=hw["gpus_per_node"] or base.node, memory_gib=hw["mem_gb"] or base.memory_gib,
        intra_gbps=hw["intra_node_GBps_per_dir"] or base.intra_gbps,
        inter_gbps=(hw["inter_node_Gbps_per_gpu"] or base.inter_gbps * 8) / 8,
    )
    seconds = row["measured"].get("step_time_s") or row["derived"].get("step_time_s")
    return Published(
        row["id"], row["source_id"], row["tier"], shape, machine, tuple(_layouts(row, shape)),
        software_of(row), seconds, row["measured"].get("peak_mem_gib"),
        row["measured"].get("peak_mem_kind") or "", row["kind"] != "oom",
        row["source_id"] in ("megatron_golden",),
    )


@cache
def hardware_of(gpu: str) -> Hardware:
    return hardware(_MACHINES[gpu])


def _layouts(row: Mapping[str, Any], shape: ModelShape) -> Iterable[RunLayout]:
    parallel, batch = row["parallel"], row["batch"]
    extras = row.get("extras") or {}
    named = str(parallel["schedule"] or "1f1b")
    vocabulary = "spread" if "vocab" in named or "interlaced" in named else "last"
    if "balance" in str(extras.get("layer_layout")):
        vocabulary = "balanced"
    if row["source_id"] == "nanotron_ultrascale":
        vocabulary = "balanced"
    data = parallel["dp"]
    unknown = (("none", 0.0), ("selective", 1.0), *(("full", k / 8) for k in range(1, 9)))
    recompute = {
        "none": (("none", 0.0), ("selective", 1.0)), "full": (("full", 1.0),),
        "selective_attention_core": (("selective", 1.0),), "selective_op": (("operators", 1.0),),
        "selective_layer(every 2nd)": (("full", 0.5),), "norm,act": (("selective", 1.0),),
        "layernorm,moe": (("selective", 1.0),), "partial": (("selective", 1.0),),
    }.get(row["recompute"], unknown)
    micros = [batch["micro"]] if batch["micro"] else [1, 2, 4]
    chunks = [parallel["vp"]] if parallel["vp"] else [1, 2, 4, 6, 8]
    if parallel["pp"] == 1:
        chunks = [1]
    size = _PRODUCTS.get(row["precision"], 1)
    for micro in micros:
        for chunk in chunks:
            for how, share in recompute:
                count = batch["num_microbatches"]
                if not count or not batch["micro"]:
                    if not batch["global"] or batch["global"] % (micro * data):
                        continue
                    count = batch["global"] // (micro * data)
                schedule = named.split("+")[0].split(" ")[0]
                schedule = _SCHEDULES.get(schedule, "interleaved1f1b")
                if chunk > 1:
                    schedule = "interleaved1f1b"
                if "vocab-" in named:
                    more = 3.0 - int(named[-1])
                else:
                    more = parallel["pp"] / 2 if "interlaced" in named else 0.0
                yield RunLayout(
                    extra_flights=more,
                    replicate=parallel["dp_replicate"], shard=parallel["dp_shard"],
                    zero=parallel["zero_stage"] or 0, tensor=parallel["tp"],
                    sequence=bool(parallel["sequence_parallel"]), pipeline=parallel["pp"],
                    chunks=chunk, context=parallel["cp"], expert=parallel["ep"],
                    schedule=schedule, micro=micro, microbatches=count, bytes=size,
                    recompute=how, vocabulary=vocabulary,
                    recompute_share=share,
                )
