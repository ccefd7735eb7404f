"""The planner's answer in words and as a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from meshwright.axes import KNOWN_AXES, Axes
from meshwright.plan import PipelinePlan, Plan, ScheduleName, ShardPlan, TrainPlan
from meshwright.planner.hardware import Hardware
from meshwright.planner.layouts import RunLayout
from meshwright.planner.memory import GIB, USABLE
from meshwright.planner.recompute import RecomputePolicy
from meshwright.planner.search import OURS, Candidate, Found, best_layouts, neighbors
from meshwright.planner.shapes import ModelShape
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


def to_plan(layout: RunLayout, shape: ModelShape, modules: str = "model.layers") -> Plan:
    """The plan of a layout; ``modules``: the list of layers in the model, for recomputing."""
    # Ranks of axis expert read batches of their own, as those of other data axes do: as many
    # replicas as divide them, and the rest of axis shard.
    of_replicas = math.gcd(layout.expert, layout.replicate)
    sizes = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicate // of_replicas,
        "shard": layout.shard // (layout.expert // of_replicas),
        "context": layout.context,
        "expert": layout.expert,
        "tensor": layout.tensor,
    }
    axes = {name: sizes[name] for name in KNOWN_AXES if sizes[name] > 1}
    schedule = cast(ScheduleName, layout.schedule)
    pipelined = PipelinePlan(schedule=schedule, microbatches=layout.microbatches)
    recomputed: tuple[str, ...] = ()
    if layout.recompute == "full":
        count = round(layout.recompute_share * shape.layers)
        every = tuple(f"{modules}.{index}" for index in range(count))
        recomputed = (f"{modules}.*",) if count == shape.layers else every
    return Plan(
        axes=Axes.of(axes),
        pipeline=pipelined if layout.pipeline > 1 else PipelinePlan(),
        shard=ShardPlan(reshard_after_forward=layout.zero != 2),
        precision=Precision(compute="bfloat16"),
        train=TrainPlan(
            accumulate=layout.microbatches if layout.pipeline == 1 else 1, recompute=recomputed
        ),
    )


def answer(
    shape: ModelShape,
    gpus: int,
    hardware: Hardware,
    batch: int = 0,
    *,
    modules: str = "model.layers",
    recomputing: Callable[[int, float], RecomputePolicy] | None = None,
) -> Answer:
    """Search the layouts and put the result into words.

    ``modules`` is the list of layers. ``recomputing`` chooses what a layout without a pipeline
    recomputes, by the tokens of a microbatch and the bytes that are left for activations.
    """
    batch = batch or max(1, 2**22 // shape.seq)
    found = best_layouts(shape, gpus, hardware, batch=batch)
    if found.best is None:
        lines = [_nothing(found, hardware, gpus, batch)]
        return Answer(lines, lines, "")
    best = found.best
    plan, policy = to_plan(best.layout, shape, modules), None
    if recomputing and best.layout.recompute == "full" and best.layout.pipeline == 1:
        others = best.memory.total - best.memory.parts["activations"]
        room = USABLE * hardware.memory_gib * GIB / (1 + OURS.fragments) - others
        policy = recomputing(best.layout.tokens(shape), room)
        plan = replace(plan, train=replace(plan.train, recompute=policy.modules))
        layout = replace(best.layout, recompute_share=policy.share)
        time = step_time(shape, layout, hardware, OURS, hardware.constants)
        parts = {**best.memory.parts, "activations": float(policy.peak)}
        best = Candidate(layout, replace(best.memory, parts=parts), time)
    toml = plan.to_toml()
    seconds, work, peak = best.time.total, best.time.work, hardware.peak()
    lines = [
        f"# {shape.name}, {shape.parameters / 1e9:.3g} billion parameters, on {gpus} "
        f"{hardware.name}, {batch} sequences of {shape.seq} a step",
        f"# {found.considered:,} layouts considered, {found.fitting:,} fit",
        f"# {seconds:.3g} s a step ({BAND[0] * seconds:.3g} to {BAND[1] * seconds:.3g}), "
        f"{batch * shape.seq / seconds:,.0f} tokens/s, MFU {work.mfu(seconds, peak):.1%}, "
        f"HFU {work.hfu(seconds, peak):.1%}",
        "# time: " + _parts(best.time.parts, 1.0, "s"),
        f"# memory of rank {best.memory.rank} of axis pipeline: {best.memory.total / GIB:.1f} GiB: "
        + _parts(best.memory.parts, GIB, "GiB"),
        *(
            f"# recompute: {policy.share:.0%} of the blocks' time, within {policy.gap:.1%} of the "
            "least"
            for policy in ([policy] if policy else [])
        ),
        toml,
        "# fastest for its memory:",
        *(f"#   {_line(candidate, hardware)}" for candidate in found.pareto),
        "# neighbors:",
        *(f"#   {line}" for line in neighbors(found, shape, hardware, batch)),
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
    needs = found.least.total * (1 + OURS.fragments) / GIB
    largest = found.least.largest
    return (
        f"nothing fits: the least of {found.considered:,} layouts needs {needs:.0f} of "
        f"{hardware.memory_gib:.0f} GiB, of it {found.least.parts[largest] / GIB:.0f} for {largest}"
    )


def _parts(parts: Mapping[str, float], unit: float, name: str) -> str:
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{key} {value / unit:.3g} {name}" for key, value in shown if value > 0)


def _line(candidate: Candidate, hardware: Hardware) -> str:
    layout = candidate.layout
    degrees = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context,
        "expert": layout.expert,
        "tensor": layout.tensor,
    }
    axes = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "one GPU"
    how = f", {layout.schedule}" if layout.pipeline > 1 else ""
    again = f", recompute {layout.recompute_share:.0%}" if layout.recompute != "none" else ""
    return (
        f"{candidate.time.total:.3g} s, {candidate.memory.total / GIB:.1f} of "
        f"{hardware.memory_gib:.0f} GiB: {axes}, {layout.microbatches} microbatches of "
        f"{layout.micro}{how}{again}"
    )
