"""Published runs: rows of a JSON file as questions to the planner.

What a row leaves open is settled as a user would: the cheapest recompute that fits, then the
fastest microbatch and number of chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware, load_hardware
from meshwright.planner.layouts import RunLayout, Software
from meshwright.planner.memory import GIB, USABLE, rank_memory
from meshwright.planner.shapes import ModelShape
from meshwright.planner.software import LAST_RANK, software_of_row
from meshwright.planner.steps import step_time

_MACHINES: Mapping[str, str] = MappingProxyType(
    {
        "A100-80GB": "a100",
        "A100-40GB": "a100-40gb",
        "H100-80GB": "h100",
        "H100-96GB-HBM2e-500W": "h100-96gb-500w",
        "H200-141GB": "h200",
        "B200": "b200",
        "B300": "b300",
        "GB200": "gb200",
        "GB300": "gb300",
    }
)
_BYTES: Mapping[str, int] = MappingProxyType({"fp16": 2, "bf16": 2, "nvfp4": 0})
# Recompute by a source's word: (how, share of the layers), in the order in which they are tried.
_UNKNOWN = (("none", 0.0), ("selective", 1.0), *(("full", eighth / 8) for eighth in range(1, 9)))
_RECOMPUTE: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {
        "none": (("none", 0.0), ("selective", 1.0)),
        "full": (("full", 1.0),),
        "selective_attention_core": (("selective", 1.0),),
        "selective_op": (("operators", 1.0),),
        "selective_layer(every 2nd)": (("full", 0.5),),
        "norm,act": (("selective", 1.0),),
        "layernorm,moe": (("selective", 1.0),),
        "partial": (("selective", 1.0),),
    }
)
_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        "": "id source_id family tier held_out kind model hw parallel batch precision recompute "
        "measured derived extras notes",
        "model": "name arch layers hidden heads kv_heads head_dim ffn glu vocab seq norm pos moe "
        "mla tied_embeddings sliding_window mtp_layers extra",
        "hw": "gpu count gpus_per_node mem_gb peak_tflops_bf16_dense intra_node_GBps_per_dir "
        "inter_node_Gbps_per_gpu inter_assumed",
        "parallel": "dp dp_replicate dp_shard zero_stage tp sequence_parallel pp vp cp ep schedule",
        "batch": "micro global local num_microbatches",
    }
)
"""Fields by table; those of `measured`, `derived` and `extras` differ by source."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner is asked: equal questions have one answer."""

    shape: ModelShape
    layout: RunLayout
    hardware: Hardware
    software: Software

    def seconds(self, constants: Constants, *, replay: bool = False) -> float:
        """Predicted time of a step."""
        asked = self.shape, self.layout, self.hardware, self.software, constants
        return step_time(*asked, replay=replay).total

    def memory(self, rank: int | None = None) -> float:
        """Predicted memory in GiB, with what its allocator wastes."""
        found = rank_memory(self.shape, self.layout, self.software, rank)
        return found.total * (1 + self.software.fragments) / GIB

    @property
    def fits(self) -> bool:
        """Whether the rank that needs the most memory has it."""
        return self.memory() <= USABLE * self.hardware.memory_gib


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row: what was run, and what was measured."""

    id: str
    source: str
    tier: str
    question: Question
    seconds: float | None
    memory_gib: float | None
    memory_kind: str
    memory_rank: int | None
    """The rank of axis pipeline whose memory was printed; None: the largest."""
    ran: bool


class _Row:
    """A row's fields by path; a wrong one raises ``PlanError`` with its name."""

    def __init__(self, tree: Mapping[str, object], name: str) -> None:
        self._tree, self.name = tree, name

    def get(self, path: str) -> object:
        """The value at ``path``; None where it is absent."""
        found: object = self._tree
        for key in path.split("."):
            if found is None:
                return None
            if not isinstance(found, Mapping):
                raise self.wrong(path, "a table above it", found)
            found = found.get(key)
        return found

    def number(self, path: str) -> float | None:
        """A number above 0, or None."""
        found = self.get(path)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e15:
            raise self.wrong(path, "a number above 0", found)
        return float(found)

    def whole(self, path: str, default: int = 1) -> int:
        """A whole number of at least 1; ``default`` where it is absent."""
        found = self.number(path)
        if found is not None and not found.is_integer():
            raise self.wrong(path, "a whole number of at least 1", found)
        return default if found is None else int(found)

    def count(self, path: str) -> int:
        """A whole number of at least 0; 0 where it is absent."""
        return 0 if self.get(path) in (0, False) else self.whole(path, 0)

    def text(self, path: str) -> str:
        """A text; empty where it is absent."""
        found = self.get(path)
        if found is not None and not isinstance(found, str):
            raise self.wrong(path, "a text", found)
        return found or ""

    def wrong(self, path: str, expected: str, found: object) -> PlanError:
        """The error of the field at ``path``."""
        return PlanError(f"{path}: expected {expected}, found {found!r}", self.name)


_machine = cache(load_hardware)


def published_runs(path: str) -> tuple[list[PublishedRun], int, int]:
    """Read a file of runs: those that the planner can express, all rows, and unknown fields.

    Raises ``PlanError`` with the row and the field that is wrong.
    """
    try:
        tree = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"expected a JSON file of runs: {error}", path) from error
    rows = tree.get("rows") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        raise PlanError("rows: expected a list of runs", path)
    runs: list[PublishedRun] = []
    unknown = 0
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise PlanError(f"rows[{place}]: expected a table, found {row!r}", path)
        for table, known in _KNOWN.items():
            inner = row.get(table) if table else row
            keys = inner if isinstance(inner, dict) else {}
            unknown += sum(key not in known.split() for key in keys)
        run = _read(_Row(row, f"{path}: {row.get('id', f'rows[{place}]')}"))
        runs += [run] if run else []
    return runs, len(rows), unknown


def _read(row: _Row) -> PublishedRun | None:
    name = _MACHINES.get(row.text("hw.gpu"))
    kind = row.text("kind") or "train_step"
    if name is None or row.get("parallel.tp") is None or kind not in ("train_step", "oom"):
        return None
    shape = _shape(row)
    base = _machine(name)
    machine = replace(
        base,
        node=row.whole("hw.gpus_per_node", base.node),
        memory_gib=row.number("hw.mem_gb") or base.memory_gib,
        intra_gbps=row.number("hw.intra_node_GBps_per_dir") or base.intra_gbps,
        inter_gbps=(row.number("hw.inter_node_Gbps_per_gpu") or 8 * base.inter_gbps) / 8,
    )
    source = row.text("source_id")
    software = software_of_row(source, row.get("extras"), row.text("precision"))
    if row.get("parallel.zero_stage") == 3 and software.flash == 3:
        software = replace(software, reduce_bytes=2)  # Megatron's FSDP reduces in 16 bits
    fitting: dict[tuple[int, int], Question] = {}
    asked = [Question(shape, layout, machine, software) for layout in _layouts(row, software)]
    for question in asked:
        key = question.layout.micro, question.layout.chunks
        if key not in fitting and question.fits:
            fitting[key] = question
    if not asked:
        return None
    likely = list(fitting.values()) or [min(asked, key=Question.memory)]
    usual = Constants()
    return PublishedRun(
        row.text("id"),
        source,
        row.text("tier"),
        likely[0] if len(likely) == 1 else min(likely, key=lambda q: q.seconds(usual)),
        row.number("measured.step_time_s") or row.number("derived.step_time_s"),
        row.number("measured.peak_mem_gib"),
        row.text("measured.peak_mem_kind"),
        row.whole("parallel.pp") - 1 if source in LAST_RANK else None,
        kind != "oom",
    )


def _shape(row: _Row) -> ModelShape:
    names = {
        "layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads",
        "head_dim": "head_dim", "ffn": "ffn", "vocab": "vocab", "seq": "seq",
        "window": "sliding_window", "experts": "moe.experts", "topk": "moe.topk",
        "moe_ffn": "moe.moe_ffn", "shared_ffn": "moe.shared_ffn",
        "dense_layers": "moe.dense_layers", "q_rank": "mla.q_lora_rank",
        "kv_rank": "mla.kv_lora_rank", "rope_dim": "mla.qk_rope_dim", "v_dim": "mla.v_head_dim",
    }  # fmt: skip
    sizes: dict[str, Any] = {ours: row.count(f"model.{theirs}") for ours, theirs in names.items()}
    sizes["head_dim"] = row.count("model.mla.qk_head_dim") or sizes["head_dim"]
    flags = {"glu": bool(row.get("model.glu")), "tied": bool(row.get("model.tied_embeddings"))}
    try:
        return ModelShape(name=row.text("model.name") or "model", **sizes, **flags)
    except PlanError as error:
        raise PlanError(f"{row.name}: model.{error}") from None


def _layouts(row: _Row, software: Software) -> Iterable[RunLayout]:
    """Every layout that a row may mean; of the first recompute the best, then the next."""
    named = row.text("parallel.schedule") or "1f1b"
    pipeline, data = row.whole("parallel.pp"), row.whole("parallel.dp")
    is_balanced = software.balanced or "balance" in str(row.get("extras.layer_layout"))
    # Sequential vocabulary passes keep more microbatches, arXiv 2411.05288.
    more = {"vocab-1": 2.0, "vocab-2": 1.0, "interlaced": pipeline / 2}.get(named[5:], 0.0)
    chunks: Sequence[int] = (1,)
    if pipeline > 1:
        known = row.get("parallel.vp") is not None
        chunks = (row.whole("parallel.vp"),) if known else (1, 2, 4, 6, 8)
    micros = (row.whole("batch.micro"),) if row.get("batch.micro") is not None else (1, 2, 4)
    zero = row.get("parallel.zero_stage") or 0
    if zero not in (0, 1, 2, 3):
        raise row.wrong("parallel.zero_stage", "0, 1, 2 or 3", zero)
    plain = RunLayout(
        replicate=row.whole("parallel.dp_replicate", data),
        shard=row.whole("parallel.dp_shard"),
        zero=int(zero),
        tensor=row.whole("parallel.tp"),
        sequence=bool(row.get("parallel.sequence_parallel")),
        pipeline=pipeline,
        context=row.whole("parallel.cp"),
        expert=row.whole("parallel.ep"),
        bytes=_BYTES.get(row.text("precision"), 1),
        vocabulary="balanced" if is_balanced else "spread" if "+" in named else "last",
        extra_flights=more,
    )
    for micro in micros:
        count = row.whole("batch.num_microbatches", 0) if len(micros) == 1 else 0
        if not count:
            batch = row.whole("batch.global", 0)
            if not batch or batch % (micro * data):
                continue
            count = batch // (micro * data)
        for chunk in chunks:
            schedule = named if named in ("zb1p", "zb2p") else "1f1b"
            for how, share in _RECOMPUTE.get(row.text("recompute"), _UNKNOWN):
                yield replace(
                    plain,
                    micro=micro,
                    microbatches=count,
                    chunks=chunk,
                    schedule=schedule if chunk == 1 else "interleaved1f1b",
                    recompute=how,
                    recompute_share=share,
                )
