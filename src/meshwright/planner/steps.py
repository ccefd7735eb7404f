"""Seconds of a step: stages, the schedule's events, data axes and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware
from meshwright.planner.kernels import Kernels, PassTimes
from meshwright.planner.layouts import (
    RunLayout,
    Software,
    rank_parameters,
    rank_stages,
    stage_layers,
)
from meshwright.planner.network import Group
from meshwright.planner.shapes import ModelShape
from meshwright.planner.utilization import StepWork
from meshwright.schedule.builders import BUILDERS, V_SHAPED, build
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; the parts are those of the slowest rank and sum to ``total``."""

    total: float
    parts: Mapping[str, float]
    work: StepWork
    """Operations of one GPU."""


def stage_times(kernels: Kernels) -> list[PassTimes]:
    """Seconds of each stage for one microbatch."""
    shape, layout = kernels.shape, kernels.layout
    moe = kernels.layer(moe=True) if shape.moe_layers else None
    dense = kernels.layer(moe=False) if shape.moe_layers < shape.layers else None
    spread = layout.vocabulary == "spread"
    head = kernels.head(layout.pipeline if spread else 1)
    unit = moe or dense or PassTimes()
    left = shape.layers - shape.moe_layers
    found: list[PassTimes] = []
    made: dict[tuple[int, int], PassTimes] = {}
    for count in stage_layers(shape, layout, head.both / unit.both):
        first = min(left, count)
        left -= first
        key = first, count - first
        if key not in made:
            times = PassTimes().plus(dense or unit, first)
            made[key] = times.plus(moe or unit, count - first)
        found.append(made[key])
    last = range(layout.pipeline) if spread else (len(found) - 1,)
    for stage in last:
        found[stage] = found[stage].plus(head)
    embedding = kernels.moved(8.0 * kernels.tokens * shape.hidden)
    found[0] = found[0].plus(PassTimes(embedding, 0.0, embedding))
    return found


def makespan(layout: RunLayout, stages: Sequence[PassTimes], transfer: float) -> float:
    """Seconds of the pipeline by counting: the slowest rank's work, and one fill and drain."""
    p, m = layout.pipeline, layout.microbatches
    slowest = max(
        sum(stages[stage].both for stage in rank_stages(layout, rank)) for rank in range(p)
    )
    if p == 1:
        return m * slowest
    each = [drain(layout.schedule, layout.chunks, stage) for stage in stages]
    fill = sum(each) - max(each) + 2 * (p - 1) * transfer
    return m * (slowest + min(longer(layout.schedule, stage) for stage in stages)) + fill


def drain(schedule: str, chunks: int, times: PassTimes) -> float:
    """What a stage adds to the fill and the drain of a pipeline."""
    late = times.forward + times.input - times.weight
    if schedule == "zb1p":
        return late
    if schedule in ("zb2p", "zbv", "dualpipev"):
        # The ranks of ZB-2p begin one after another.
        return max(0.0, late - times.weight, times.forward if schedule == "zb2p" else 0.0)
    return times.both / chunks


def longer(schedule: str, times: PassTimes) -> float:
    """What two stages of V-Min add to a microbatch: a slot is as long as the longest of F, I, W."""
    longest = max(times.forward, times.input, times.weight)
    return 6 * longest - 2 * times.both if schedule == "vmin" else 0.0


def is_built(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether a builder has the schedule for so many microbatches."""
    fewest = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    rounds = microbatches // ranks if schedule in ("interleaved1f1b", "zb1p") else 1
    return schedule in BUILDERS and microbatches >= fewest and not microbatches % max(1, rounds)


def replayed(layout: RunLayout, stages: Sequence[PassTimes], transfer: float) -> float:
    """The same from the events of the schedule that would run.

    Past its fill a schedule repeats itself, so that longer steps are drawn out.
    Schedules without a builder are counted.
    """
    p, m = layout.pipeline, layout.microbatches
    rounds = 2 if layout.schedule in ("zb2p", *V_SHAPED) else 1
    if p == 1 or not is_built(layout.schedule, p, m if m <= (rounds + 1) * p else 2 * p):
        return makespan(layout, stages, transfer)
    costs = Costs(
        forward=[s.forward for s in stages],
        input=[s.input for s in stages],
        weight=[s.weight for s in stages],
        transfer=transfer,
    )

    def run(count: int) -> float:
        lowered = lower(build(layout.schedule, p, count, layout.chunks))
        return simulate(lowered, costs, events=False).makespan

    if m <= (rounds + 1) * p:
        return run(m)
    short, long = run(rounds * p), run((rounds + 1) * p)
    return long + (m - (rounds + 1) * p) * (long - short) / p


def shard_seconds(kernels: Kernels) -> tuple[float, float, float]:
    """Seconds in which a microbatch's weights are gathered and its gradients scattered.

    In the forward, in the backward, and of the first and the last unit, which nothing hides.
    """
    shape, layout, constants = kernels.shape, kernels.layout, kernels.constants
    ranks, t = layout.shard * layout.context, layout.tensor
    group = Group(ranks, t, kernels.hardware)
    experts = Group(max(1, ranks // layout.expert), t * layout.expert, kernels.hardware)
    moe = bool(shape.moe_layers)
    dense = (shape.moe_parameters if moe else shape.dense_parameters) / t
    expert = shape.expert_parameters / layout.expert if moe else 0.0

    def seconds(size: float) -> float:
        found = group.gather(size * dense, constants)
        return found + (experts.gather(size * expert, constants) if expert else 0.0)

    reduce = kernels.software.reduce_bytes * (1 - shape.frozen)
    vocabulary = shape.vocab * shape.hidden / t
    gather, scatter = seconds(2.0), seconds(reduce)
    edge = group.gather(2.0 * vocabulary, constants)
    to_forward = gather * shape.layers + edge
    to_back = scatter * shape.layers + group.gather(reduce * vocabulary, constants)
    if layout.zero == 3:
        to_back += to_forward
    return to_forward, to_back, gather + scatter + edge


def beside(compute: float, communication: float, constants: Constants) -> float:
    """Seconds of both, which run beside each other."""
    slower = (constants.contention - 1) * min(communication, compute)
    return max(compute + slower, communication)


def data_seconds(kernels: Kernels, dense: float, expert: float) -> float:
    """Seconds in which gradients and new weights of a step travel between data ranks."""
    layout, constants, t = kernels.layout, kernels.constants, kernels.layout.tensor
    trained, total = 1 - kernels.shape.frozen, 0.0
    size = kernels.software.reduce_bytes * trained
    if layout.is_fully_sharded and layout.pipeline == 1:
        group = Group(layout.replicate, t * layout.shard * layout.context, kernels.hardware)
        return group.reduce(size * layout.kept(dense, expert), constants)
    ranks = layout.data * layout.context
    for group, count in (
        (Group(ranks, t, kernels.hardware), dense),
        (Group(max(1, ranks // layout.expert), t * layout.expert, kernels.hardware), expert),
    ):
        if group.size < 2 or not count:
            continue
        if layout.zero == 0 or kernels.software.all_reduces:
            total += group.reduce(size * count, constants)
        else:
            total += group.gather(size * count, constants)
        if layout.zero:
            total += group.gather(2.0 * trained * count, constants)
    return total


def exposed(kernels: Kernels, seconds: float, busy: float) -> float:
    """What a step waits for, of ``seconds`` that may travel beside ``busy`` of a microbatch.

    Gathers of weights have used the network for the rest of it.
    """
    if not kernels.software.overlap_data:
        return seconds
    return max(seconds - kernels.constants.data_overlap * max(0.0, busy), 0.15 * seconds)


def step_time(
    shape: ModelShape,
    layout: RunLayout,
    hardware: Hardware,
    software: Software,
    constants: Constants,
    *,
    replay: bool = False,
) -> StepTime:
    """Predict one step; ``replay`` simulates the schedule's events instead of counting them."""
    kernels = Kernels(shape, layout, hardware, software, constants)
    stages = stage_times(kernels)
    p, m = layout.pipeline, layout.microbatches
    sharded = gathers = 0.0
    if layout.is_fully_sharded and layout.sharers > 1 and p == 1:
        to_forward, to_back, ends = shard_seconds(kernels)
        forward, back = stages[0].forward, stages[0].input + stages[0].weight
        shown = beside(forward, to_forward, constants) + beside(back, to_back, constants)
        sharded = m * (shown + ends - forward - back)
        gathers = to_forward + to_back
    size = 2.0 * kernels.tokens * shape.hidden
    if layout.sequence or software.split_transfers:
        size /= layout.tensor
    group = Group(p, layout.tensor * layout.context * layout.data, hardware)
    transfer = group.send(size, constants)
    blocked = 2 * transfer * layout.chunks * m if software.blocking_transfers else 0.0
    span = (replayed if replay else makespan)(layout, stages, transfer)
    ranks = [
        sum((stages[stage] for stage in rank_stages(layout, rank)), PassTimes())
        for rank in range(p)
    ]
    slowest = max(ranks, key=lambda rank: rank.both)
    dense, expert = max(
        (rank_parameters(shape, layout, rank) for rank in {0, min(1, p - 1), p - 1}), key=sum
    )
    free = max(rank.both for rank in ranks) - gathers
    reduce = exposed(kernels, data_seconds(kernels, dense, expert), free)
    optimizer = kernels.moved(constants.optimizer * (1 - shape.frozen) * layout.kept(dense, expert))
    slow = constants.straggle * math.log2(max(1.0, layout.gpus / hardware.node))
    waiting = m * slowest.waiting
    parts = {
        "compute": m * slowest.both - waiting,
        "tensor": waiting,
        "shard": sharded,
        "replicate": reduce,
        "pipeline": blocked,
        "bubble": max(0.0, span - m * slowest.both),
        "optimizer": optimizer,
        "other": constants.step + slow * (span + blocked),
    }
    again = {
        "full": shape.layer_flops,
        "selective": 0.0 if software.flash else shape.core_flops,
        "operators": (shape.layer_flops - shape.core_flops) / 2,
    }.get(layout.recompute, 0.0)
    work = StepWork(shape.flops, layout.recompute_share * shape.layers * again)
    work = work.times(shape.seq * layout.batch / layout.gpus)
    return StepTime(sum(parts.values()), parts, work)
