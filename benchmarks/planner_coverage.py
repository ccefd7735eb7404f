"""Which share of the published runs each planner can express, by their layouts.

    python benchmarks/planner_coverage.py              # the table of docs/planner.md
    python benchmarks/planner_coverage.py runs.json    # counts a file anew, then prints it

What a layout needs is read from its row: `PLANNERS` names what each planner's paper or page says
that it knows, and its own error, or nothing where it gives none. They are read generously: whoever
knows axis tensor may split sequences over it, whoever knows replicas may share their optimizer,
and kinds of attention, numbers and recomputing are left aside. `published_layouts.json` keeps the
number of rows by what they need.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PLANNERS", "counted", "main", "needs", "table"]

KEPT = Path(__file__).with_name("published_layouts.json")
REPLICAS = frozenset({"replicas", "shared optimizer"})
FSDP = frozenset({"FSDP"})
THREE = REPLICAS | {"tensor", "sequence", "pipeline"}
MEGATRON = THREE | {"interleaved"}
EXPERTS, CONTEXT = frozenset({"experts"}), frozenset({"context"})
ALL = MEGATRON | FSDP | EXPERTS | CONTEXT | {"zero-bubble", "vocabulary by stage"}

PLANNERS: Mapping[str, tuple[frozenset[str], str]] = {
    "this one": (ALL, "the tables above"),
    "SimAI": (MEGATRON | FSDP | EXPERTS, "1.9 %"),
    "llm-analysis": (THREE | FSDP | EXPERTS, ""),
    "Calculon": (MEGATRON, "3.65 % on average, 8.87 % at most, 8 runs"),
    "Lumos": (MEGATRON, "3.3 % on average"),
    "Megatron-LM #482": (MEGATRON, "memory: about 1 %, a few runs"),
    "Fujii et al.": (THREE | CONTEXT, "memory: below 80 % of it, no run failed"),
    "vTrain": (THREE, "8.37 % on one node, 14.73 % to 512 GPUs"),
    "arXiv 2509.22832": (THREE, "4.98 % A100, 9.38 % GH200"),
    "DeepSpeed's estimators": (REPLICAS | FSDP, ""),
    "torchtitan's estimator": (FSDP, ""),
    "LLMem": (REPLICAS | {"tensor"}, "memory: 1.6 % one GPU, 3.0 % several"),
}
"""What each can express, and the error that it or its check gives."""

COLUMNS = ("FSDP", "context", "zero-bubble", "vocabulary by stage", "experts")


def needs(row: Mapping[str, Any]) -> frozenset[str] | None:
    """What a planner must know to express a row; None where the row states no whole step."""
    parallel, schedule = row["parallel"], str(row["parallel"]["schedule"])
    if row["kind"] not in ("train_step", "oom") or parallel["tp"] is None:
        return None
    zero, stages, shard = parallel["zero_stage"] or 0, parallel["pp"], parallel["dp_shard"] or 1
    is_fully = zero == 3 or (zero == 2 and shard > 1 and stages == 1)
    layers = str(row.get("extras", {}).get("layer_layout"))
    found = {
        "FSDP": is_fully,
        "replicas": (parallel["dp"] or 1) > 1 and not is_fully,
        "shared optimizer": zero > 0 and not is_fully,
        "tensor": parallel["tp"] > 1,
        "sequence": bool(parallel.get("sequence_parallel")),
        "pipeline": stages > 1,
        "interleaved": schedule.startswith("interleaved"),
        "zero-bubble": schedule.startswith("zb"),
        "vocabulary by stage": "+" in schedule or "balance" in layers,
        "context": (parallel.get("cp") or 1) > 1,
        "experts": row["model"].get("arch") == "moe",
    }
    return frozenset(name for name, is_needed in found.items() if is_needed)


def counted(rows: list[Mapping[str, Any]]) -> dict[str, int]:
    """Rows by what they need, its words joined by commas."""
    all_needs = [needs(row) for row in rows]
    found = Counter(", ".join(sorted(each)) for each in all_needs if each is not None)
    return dict(sorted(found.items()))


def table(counts: Mapping[str, int]) -> str:
    """The table in Markdown: rows that each planner can express, of all and of some kinds."""
    split = [(frozenset(key.split(", ")) - {""}, count) for key, count in counts.items()]

    def expressed(known: frozenset[str], kind: str = "") -> int:
        return sum(n for each, n in split if each <= known and (not kind or kind in each))

    sizes = {kind: expressed(ALL, kind) for kind in ("", *COLUMNS)}
    heads = [f"{kind or 'Rows'}, {size}" for kind, size in sizes.items()]
    lines = [
        f"| Planner | {' | '.join(heads)} | Its own error |",
        "|---|" + "--:|" * len(heads) + "---|",
    ]
    for name, (known, error) in PLANNERS.items():
        cells = [f"{expressed(known, kind)}" for kind in sizes]
        cells[0] = f"{expressed(known) / sizes['']:.0%}".replace("%", " %")
        lines.append(f"| {name} | {' | '.join(cells)} | {error or 'none given'} |")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Print the table, of the kept counts or of the file that is named."""
    if words:
        rows = json.loads(Path(words[0]).read_text())["rows"]
        KEPT.write_text(json.dumps(counted(rows), indent=2) + "\n")
    print(table(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
