"""The planner's answer in words and as a `Plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

from meshwright.axes import Axes
from meshwright.plan import (
    ExpertPlan,
    PipelinePlan,
    Plan,
    ScheduleName,
    ShardPlan,
    TensorPlan,
    TrainPlan,
)
from meshwright.planner.hardware import Hardware
from meshwright.planner.layouts import LAYER_LISTS, RunLayout, Software, stage_layers, tensor_rules
from meshwright.planner.memory import GIB, USABLE
from meshwright.planner.recompute import RecomputePolicy
from meshwright.planner.search import Candidate, Found, best_layouts, neighbors
from meshwright.planner.shapes import ModelShape
from meshwright.planner.software import OURS
from meshwright.planner.steps import step_time
from meshwright.precision import Precision

BAND = (0.8, 1.35)
"""Measured over predicted of nine in ten published runs whose source the constants had not seen."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What ``meshwright plan`` prints."""

    lines: list[str]
    fit_lines: list[str]
    toml: str
    """The best plan; empty where nothing fits."""


def to_plan(layout: RunLayout, shape: ModelShape, blocks: Sequence[str] = ()) -> Plan:
    """The plan of a layout; ``blocks``: the names of the layers, by default Hugging Face's."""
    listed = LAYER_LISTS.get(shape.name, "model.layers")
    names = blocks or [f"{listed}.{index}" for index in range(shape.layers)]
    stages = list(pairwise((0, *accumulate(stage_layers(shape, layout)))))
    again = [n for a, b in stages for n in names[a : a + layout.recomputed(b - a)]]
    if len(again) == len(names):
        again = list(dict.fromkeys(f"{n.rpartition('.')[0]}.*".lstrip(".") for n in names))
    is_flat = layout.pipeline == 1
    pipelined = PipelinePlan(
        schedule=cast(ScheduleName, layout.schedule),
        microbatches=layout.microbatches,
        split=tuple(names[a] for a, _ in stages[1:]),
    )
    return Plan(
        axes=Axes.of(layout.axes),
        pipeline=PipelinePlan() if is_flat else pipelined,
        shard=ShardPlan(reshard_after_forward=layout.zero != 2),
        tensor=TensorPlan(rules=tensor_rules(shape) if layout.tensor > 1 else None),
        expert=ExpertPlan(balance="global" if layout.expert > 1 else None),
        precision=Precision(compute="bfloat16"),
        train=TrainPlan(accumulate=layout.microbatches if is_flat else 1, recompute=tuple(again)),
    )


def answer(
    shape: ModelShape,
    gpus: int,
    hardware: Hardware,
    batch: int = 0,
    *,
    blocks: Sequence[str] = (),
    software: Software = OURS,
    recomputing: Callable[[int, float], RecomputePolicy] | None = None,
) -> Answer:
    """Search the layouts and put the result into words.

    ``blocks`` are the names of layers. ``recomputing`` chooses what a layout without a pipeline
    recomputes, by the tokens of a microbatch and the bytes that are left for activations.
    """
    if not batch:
        batch = max(1, 2**22 // shape.seq)
        data = next(size for size in range(min(gpus, batch), 0, -1) if gpus % size == 0)
        batch -= batch % data  # so that the data ranks of some layout divide it
    found = best_layouts(shape, gpus, hardware, batch=batch, software=software)
    if found.best is None:
        lines = [_nothing(found, hardware, gpus, batch)]
        return Answer(lines, lines, "")
    best = found.best
    plan, policy = to_plan(best.layout, shape, blocks), None
    if recomputing and best.layout.recompute == "full" and best.layout.pipeline == 1:
        others = best.memory.total - best.memory.parts["activations"]
        room = USABLE * hardware.memory_gib * GIB / (1 + software.fragments) - others
        policy = recomputing(best.layout.tokens(shape), room)
        plan = replace(plan, train=replace(plan.train, recompute=policy.modules))
        layout = replace(best.layout, recompute_share=policy.share)
        time = step_time(shape, layout, hardware, software, hardware.constants)
        parts = {**best.memory.parts, "activations": float(policy.peak)}
        best = Candidate(layout, replace(best.memory, parts=parts), time)
    toml = plan.to_toml()
    held = {**best.memory.parts, "fragments": OURS.fragments * best.memory.total}
    seconds, work, peak = best.time.total, best.time.work, hardware.peak()
    lines = [
        f"# {shape.name}, {shape.parameters / 1e9:.3g} billion parameters, on {gpus} "
        f"{hardware.name}, {batch} sequences of {shape.seq} a step",
        f"# {found.considered:,} layouts considered, {found.fitting:,} fit",
        f"# {seconds:.3g} s a step ({BAND[0] * seconds:.3g} to {BAND[1] * seconds:.3g}), "
        f"{batch * shape.seq / seconds:,.0f} tokens/s, MFU {work.mfu(seconds, peak):.1%}, "
        f"HFU {work.hfu(seconds, peak):.1%}",
        "# time: " + _parts(best.time.parts, 1.0, "s"),
        f"# memory of rank {best.memory.rank} of axis pipeline: "
        f"{_of(best.memory.total, hardware)}: {_parts(held, GIB, 'GiB')}",
        *(
            f"# recompute: {policy.share:.0%} of the blocks' time, within {policy.gap:.1%} of the "
            "least"
            for policy in ([policy] if policy else [])
        ),
        toml,
        "# fastest for its memory:",
        *(f"#   {_line(candidate, hardware)}" for candidate in found.pareto),
        "# neighbors:",
        *(f"#   {line}" for line in neighbors(found, shape, hardware, batch, software)),
    ]
    least = found.pareto[-1]
    fit_lines = [f"fits: {found.fitting:,} of {found.considered:,} layouts", _line(least, hardware)]
    return Answer(lines, fit_lines, toml)


def _nothing(found: Found, hardware: Hardware, gpus: int, batch: int) -> str:
    if found.least is None:
        return (
            f"nothing fits: no layout of {gpus} GPUs divides {batch} sequences and the model's "
            "heads, layers and sequence"
        )
    largest = found.least.largest
    return (
        f"nothing fits: the least of {found.considered:,} layouts of {batch} sequences needs "
        f"{_of(found.least.total, hardware)}, of it {found.least.parts[largest] / GIB:.3g} for "
        f"{largest}"
    )


def _of(size: float, hardware: Hardware) -> str:
    """Bytes with what is lost between them, and what a run can have."""
    usable = USABLE * hardware.memory_gib
    return f"{size * (1 + OURS.fragments) / GIB:.3g} of {usable:.3g} usable GiB"


def _parts(parts: Mapping[str, float], unit: float, name: str) -> str:
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{key} {value / unit:.3g} {name}" for key, value in shown if value > 0)


def _line(candidate: Candidate, hardware: Hardware) -> str:
    layout = candidate.layout
    axes = " x ".join(f"{name} {size}" for name, size in layout.axes.items()) or "one GPU"
    axes += ", weights stay gathered" if layout.zero == 2 else ""
    how = f", {layout.schedule}" if layout.pipeline > 1 else ""
    again = f", recompute {layout.recompute_share:.0%}" if layout.recompute != "none" else ""
    return (
        f"{candidate.time.total:.3g} s, {_of(candidate.memory.total, hardware)}: {axes}, "
        f"{layout.microbatches} microbatch{'es' * (layout.microbatches > 1)} of "
        f"{layout.micro}{how}{again}"
    )
