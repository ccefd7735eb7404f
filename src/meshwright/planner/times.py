"""Seconds of a step, by category: what each stage computes, and what it waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware
from meshwright.planner.layouts import RunLayout, Software, stage_layers
from meshwright.planner.network import Group
from meshwright.planner.shapes import ModelShape
from meshwright.schedule.builders import BUILDERS, build
from meshwright.schedule.lowering import lower
from meshwright.schedule.simulate import Costs, simulate

__all__ = ["StageTimes", "StepTime", "step_time"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; the parts are of the slowest rank and sum to ``total``."""

    total: float
    parts: Mapping[str, float]
    flops: float
    """Model operations of one GPU: forward and backward, full attention, nothing twice."""

    def mfu(self, hardware: Hardware) -> float:
        """Model operations as a share of the data sheet's bf16 rate."""
        return self.flops / (self.total * hardware.peak_tflops * 1e12)


@dataclass(slots=True)
class StageTimes:
    """Seconds of one microbatch in one layer or stage, by pass and kind."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    tensor: float = 0.0
    """Of these, waiting for axis tensor, context or expert, forward and backward."""

    def plus(self, other: StageTimes, times: float = 1.0) -> StageTimes:
        return StageTimes(
            self.forward + times * other.forward,
            self.input + times * other.input,
            self.weight + times * other.weight,
            self.tensor + times * other.tensor,
        )

    @property
    def backward(self) -> float:
        return self.input + self.weight


@cache
def _waves(m: int, n: int, processors: int) -> float:
    """Share of the processors' time that the tiles of an m x n product use, the best tile taken.

    Small tiles fill the machine more evenly but read their inputs more often.
    """
    best = 0.0
    for rows, columns, share in ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.6)):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        filled = m * n / (math.ceil(tiles / processors) * processors * rows * columns)
        best = max(best, share * filled)
    return best


class StepModel:
    """Times of one layout of one model on one machine."""

    def __init__(
        self,
        shape: ModelShape,
        layout: RunLayout,
        hardware: Hardware,
        software: Software,
        constants: Constants,
    ) -> None:
        self.shape, self.layout, self.hardware = shape, layout, hardware
        self.software, self.constants = software, constants
        self.tokens = layout.micro * math.ceil(shape.seq / layout.context)
        node = hardware
        self.tensor = Group(layout.tensor, 1, node)
        self.context = Group(layout.context, layout.tensor, node)
        inner = layout.tensor * layout.context
        self.expert = Group(layout.expert, layout.tensor, node)
        self.data = Group(layout.data * layout.context, layout.tensor, node)
        self.stage = Group(layout.pipeline, inner * layout.data, node)
        self.product = getattr(constants, f"product_{hardware.generation}")

    # ------------------------------------------------------------------ kernels

    def product_seconds(self, m: float, n: int, k: int, size: int = 2, count: int = 1) -> float:
        """Seconds of ``count`` products m x k by k x n."""
        m_ = max(1, int(m))
        low = min(m_, n, k)
        constants = self.constants
        share = self.product * low / (low + constants.half_size)
        if size < 2:
            share *= constants.fp8
        work = 2.0 * m_ * n * k / (self.hardware.products[size] * share * max(
            _waves(m_, n * count, self.hardware.processors), 0.02
        ))
        moved = 2.0 * (m_ * k + n * k + m_ * n) / (self.hardware.memory_gbps * 1e9)
        extra = 0.0
        if size < 2:
            scaled = constants.quantize * (3 if self.software.rowwise else 1)
            extra = scaled * (m_ * k + 0.0) / (self.hardware.memory_gbps * 1e9)
        return count * (max(work, moved) + extra)

    def moved_seconds(self, count: float) -> float:
        """Seconds to move ``count`` bytes of the GPU's memory."""
        return count / (self.hardware.memory_gbps * 1e9)

    def attention(self) -> tuple[float, float]:
        """Seconds of forward and backward of the core of attention in one layer."""
        shape, layout, constants = self.shape, self.layout, self.constants
        heads = max(1, shape.heads // layout.tensor)
        keys = shape.seq
        if shape.window:
            keys = (keys + 2 * shape.window) / 2
        operations = 2.0 * self.tokens * keys * heads * (shape.head + (shape.v_dim or shape.head))
        rate = self.hardware.products[2]
        if self.software.flash:
            share = (constants.flash_first, constants.flash_second, constants.flash_third)[
                min(self.software.flash, 3 if self.hardware.generation != "ampere" else 2) - 1
            ]
            if self.software.flash < 3 and self.hardware.generation != "ampere":
                share *= constants.ported
            share *= min(1.0, shape.head / 128) ** 0.25 * shape.seq / (shape.seq + 512)
            forward = operations / 2 / (rate * share)
            if layout.context > 1 and self.software.flash < 3:
                forward *= 1 + constants.ring * (1 - 1 / layout.context)
            slow = constants.deterministic if self.software.deterministic else 1.0
            return forward, 2.5 * slow * forward / 0.9
        batch = heads * layout.micro
        seq = shape.seq
        products = self.product_seconds(seq, seq, shape.head, count=batch) + self.product_seconds(
            seq, shape.head, seq, count=batch
        )
        scores = self.moved_seconds(constants.scores * heads * self.tokens * keys)
        return products + scores, 2 * products + scores

    def feed_forward(self, m: float, ffn: int, experts: int = 1) -> tuple[float, float]:
        """(Forward, weight gradient) seconds of one feed-forward or ``experts`` of one size."""
        h, size, gates = self.shape.hidden, self.layout.bytes, self.shape.matrices - 1
        up = self.product_seconds(m, gates * ffn, h, size, experts)
        down = self.product_seconds(m, h, ffn, size, experts)
        weights = self.product_seconds(gates * ffn, h, int(m), size, experts)
        return up + down, weights + self.product_seconds(h, ffn, int(m), size, experts)

    def layer(self, *, moe: bool = False) -> StageTimes:
        """One layer, one microbatch."""
        shape, layout, constants, software = (
            self.shape, self.layout, self.constants, self.software,
        )
        n, t, h = self.tokens, layout.tensor, shape.hidden
        forward = weight = 0.0
        for rows, columns, split in shape.projections:
            by_rows = columns == h and split
            rows_, columns_ = (rows // t, columns) if by_rows else (rows, max(1, columns // t))
            if not split:
                rows_, columns_ = rows, columns
            forward += self.product_seconds(n, columns_, rows_, layout.bytes)
            weight += self.product_seconds(columns_, rows_, n, layout.bytes)
        ffn = shape.ffn
        comm = 0.0
        kernels = 30 if not software.compiled else 18
        width = max(1, shape.ffn // t) * (shape.matrices - 1)
        if moe:
            routed = n * shape.topk / max(1, t if software.graphs or layout.sequence else 1)
            local = max(1, shape.experts // layout.expert)
            f, w = self.feed_forward(max(1.0, routed / local), shape.moe_ffn, local)
            forward, weight = forward + f, weight + w
            if shape.shared_ffn:
                f, w = self.feed_forward(n, max(1, shape.shared_ffn // t))
                forward, weight = forward + f, weight + w
            width = routed / n * shape.moe_ffn * 2
            forward += self.moved_seconds(constants.dispatch * routed * h)
            comm += 2 * self.expert.exchange(2.0 * routed * h, shape.topk, constants)
            kernels += 40
        else:
            f, w = self.feed_forward(n, max(1, ffn // t))
            forward, weight = forward + f, weight + w
        grad = forward
        between = n / t if layout.sequence else n
        fused = constants.compiled if software.compiled else 1.0
        simple = self.moved_seconds(
            fused * constants.elementwise * (between * h * 0.75 + n * width * 0.125)
        )
        if software.parallel_block:
            simple *= 0.75
        core, core_back = self.attention()
        products = forward
        forward = products + simple + core
        backward = grad + 2 * simple + core_back
        # Collectives.
        reduce = self.tensor.reduce(2.0 * n * h, constants)
        reduce *= 1 if software.parallel_block else 2
        hidden = constants.tensor_overlap if software.overlap_tensor else 0.0
        comm_forward = reduce * (1 - hidden) + comm
        comm_back = reduce * (1 - hidden) + comm
        if layout.context > 1:
            keys = 2 * 2.0 * shape.keys / t * layout.micro * shape.seq
            ring = self.context.gather(keys, constants)
            comm_forward += max(0.0, ring - 0.5 * core)
            comm_back += max(0.0, 2 * ring - 0.5 * core_back)
        again = products_again = 0.0
        if layout.recompute == "full":
            again, products_again = forward, comm_forward
        elif layout.recompute == "selective":
            again = core if not software.flash else simple * 0.5
        elif layout.recompute == "operators":
            again, products_again = 0.5 * products + simple, 0.5 * comm_forward
        again, products_again = again * layout.recompute_share, (
            products_again * layout.recompute_share
        )
        launch = 0.0 if software.graphs else constants.launch
        forward = max(forward, launch * kernels)
        backward_floor = launch * kernels * (1.6 + (1.0 if layout.recompute == "full" else 0.0))
        parameters = (shape.moe_parameters if moe else shape.dense_parameters) / t
        parameters += shape.expert_parameters / layout.expert if moe else 0.0
        weight += self.moved_seconds((6.0 if software.fused_accumulation else 10.0) * parameters)
        input_ = backward + again
        total = max(input_ + weight, backward_floor)
        return StageTimes(
            forward + comm_forward,
            total - weight + comm_back + products_again,
            weight,
            comm_forward + comm_back + products_again,
        )

    def head(self, share: int = 1) -> StageTimes:
        """The output layer and its loss; ``share``: ranks over which the vocabulary is spread."""
        shape, t, n = self.shape, self.layout.tensor * share, self.tokens
        columns = max(1, shape.vocab // t)
        forward = self.product_seconds(n, columns, shape.hidden)
        weight = self.product_seconds(columns, shape.hidden, n)
        fused = self.constants.compiled if self.software.compiled else 1.0
        loss = self.moved_seconds(fused * 20.0 * n * columns)
        wait = self.tensor.reduce(2.0 * n * shape.hidden, self.constants)
        return StageTimes(forward + loss, forward + loss / 2 + wait, weight, wait)

    # ------------------------------------------------------------------ stages

    def stages(self) -> list[StageTimes]:
        """Each stage, one microbatch."""
        layout, shape = self.layout, self.shape
        dense = self.layer()
        moe = self.layer(moe=True) if shape.moe_layers else dense
        unit = moe if shape.moe_layers else dense
        spread = layout.pipeline if layout.vocabulary == "spread" else 1
        head = self.head(spread)
        work = (head.forward + head.backward) / (unit.forward + unit.backward)
        counts = stage_layers(shape, layout, work)
        left = shape.layers - shape.moe_layers
        found = []
        for stage, count in enumerate(counts):
            first = min(left, count)
            left -= first
            times = StageTimes().plus(dense, first).plus(moe, count - first)
            if layout.vocabulary == "spread":
                if stage < layout.pipeline:
                    times = times.plus(head)
            elif stage == layout.stages - 1:
                times = times.plus(head)
            found.append(times)
        embed = self.moved_seconds(8.0 * self.tokens * shape.hidden)
        found[0].forward += embed
        found[0].weight += embed
        return found

    # ------------------------------------------------------------------ data axes

    def stage_parameters(self) -> tuple[float, float]:
        """Largest number of (dense, expert) parameters of a rank of axis pipeline."""
        return stage_parameters(self.shape, self.layout)

    def sharded(self, stages: Sequence[StageTimes]) -> tuple[list[StageTimes], float]:
        """Stages whose weights are gathered and gradients scattered in each microbatch."""
        layout, shape, constants = self.layout, self.shape, self.constants
        counts = stage_layers(shape, layout)
        group = Group(layout.shard * layout.context, layout.tensor, self.hardware)
        experts = Group(
            max(1, layout.shard * layout.context // layout.expert),
            layout.tensor * layout.expert,
            self.hardware,
        )
        dense = shape.moe_parameters if shape.moe_layers else shape.dense_parameters
        dense /= layout.tensor
        expert = shape.expert_parameters / layout.expert if shape.moe_layers else 0

        def seconds(size: float) -> float:
            found = group.gather(size * dense, constants)
            return found + (experts.gather(size * expert, constants) if expert else 0.0)

        gather, scatter = seconds(2.0), seconds(self.software.reduce_bytes)
        found, exposed = [], 0.0
        for stage, (times, count) in enumerate(zip(stages, counts, strict=True)):
            vocab = shape.vocab * shape.hidden / layout.tensor if stage in (
                0, layout.stages - 1) else 0.0
            edge = group.gather(2.0 * vocab, constants)
            comm_f = gather * count + edge
            comm_b = comm_f * (layout.zero == 3) + scatter * count + group.gather(
                self.software.reduce_bytes * vocab, constants)
            f = _beside(times.forward, comm_f, constants)
            b = _beside(times.backward, comm_b, constants)
            ends = gather + scatter + edge
            exposed = max(exposed, f + b - times.forward - times.backward + ends)
            found.append(
                StageTimes(f + gather, b - times.weight + scatter + edge, times.weight, times.tensor)
            )
        return found, exposed

    def reduced(self, stages: Sequence[StageTimes]) -> float:
        """Seconds that a step waits for gradients and updated weights of replicas."""
        layout, constants, software = self.layout, self.constants, self.software
        dense, expert = self.stage_parameters()
        grad = software.reduce_bytes
        group, total = self.data, 0.0
        if layout.zero == 3 and layout.pipeline == 1:
            group = Group(layout.replicate, layout.tensor * layout.shard, self.hardware)
            return group.reduce(grad * dense / layout.shard, constants)
        experts = Group(
            max(1, self.data.size // layout.expert), layout.tensor * layout.expert, self.hardware
        )
        for group_, count in ((group, dense), (experts, expert)):
            if group_.size > 1 and count:
                if layout.zero == 0:
                    total += group_.reduce(grad * count, constants)
                else:
                    total += group_.gather(grad * count, constants)
                    total += group_.gather(2.0 * count, constants)
        if software.overlap_data:
            busy = max(s.forward + s.backward for s in stages) * layout.chunks
            total = max(total - constants.data_overlap * busy, 0.15 * total)
        return total

    def optimizer(self) -> float:
        layout = self.layout
        dense, expert = self.stage_parameters()
        share = self.data.size if layout.zero in (1, 2) else (
            layout.shard * layout.context if layout.zero == 3 else 1)
        parameters = dense / share + expert / max(1, share / layout.expert)
        return self.moved_seconds(self.constants.optimizer * parameters)


def _beside(compute: float, comm: float, constants: Constants) -> float:
    """Seconds of compute with communication beside it."""
    hidden = min(comm, compute)
    return max(compute + (constants.contention - 1) * hidden, comm)


def stage_parameters(shape: ModelShape, layout: RunLayout) -> tuple[float, float]:
    counts = stage_layers(shape, layout)
    p, vocab = layout.pipeline, shape.vocab * shape.hidden
    best = (0.0, 0.0)
    left = shape.layers - shape.moe_layers
    dense_of = []
    for count in counts:
        dense_of.append(min(left, count))
        left -= dense_of[-1]
    for rank in range(p):
        dense = expert = 0.0
        for stage in range(rank, layout.stages, p):
            moe = counts[stage] - dense_of[stage]
            dense += dense_of[stage] * shape.dense_parameters + moe * shape.moe_parameters
            expert += moe * shape.expert_parameters
        if layout.vocabulary == "spread":
            dense += 2 * vocab / p
        else:
            ends = (rank == 0) + (rank == p - 1)
            dense += vocab * (1 if shape.tied and p == 1 else ends)
        dense /= layout.tensor
        expert /= layout.expert
        if dense + expert > sum(best):
            best = dense, expert
    return best


# ---------------------------------------------------------------------- schedules

_CLOSED = {"1f1b", "gpipe", "interleaved1f1b", "loopedbfs", "zb1p", "zb2p", "zbv", "dualpipev"}


def closed_makespan(layout: RunLayout, stages: Sequence[StageTimes], transfer: float) -> float:
    """Seconds of the pipeline by counting: the slowest rank's work, and a fill and a drain."""
    p, m = layout.pipeline, layout.microbatches
    ranks = [sum(stages[s].forward + stages[s].backward for s in range(r, len(stages), p))
             for r in range(p)]
    slowest = max(ranks)
    if p == 1:
        return m * slowest
    chunk = [sum((stages[s].forward, stages[s].backward)) for s in range(len(stages))]
    fill = (sum(chunk) - max(chunk)) / layout.chunks
    if layout.schedule == "zb1p":
        fill = sum(s.forward + s.input - s.weight for s in stages[:-1])
    elif layout.schedule in ("zb2p", "zbv"):
        fill = sum(max(0.0, s.forward + s.input - 2 * s.weight) for s in stages[:-1])
    return m * slowest + fill + 2 * (p - 1) * transfer


def replayed_makespan(layout: RunLayout, stages: Sequence[StageTimes], transfer: float) -> float:
    """The same from the events of the schedule that would run.

    Past three rounds of microbatches a schedule repeats itself, so that longer steps are drawn out.
    """
    p, m = layout.pipeline, layout.microbatches
    if p == 1:
        return closed_makespan(layout, stages, transfer)
    name = layout.schedule
    if name not in BUILDERS or (p * layout.chunks > 64 and m > p):
        return closed_makespan(layout, stages, transfer)
    costs = Costs(
        forward=[s.forward for s in stages],
        input=[s.input for s in stages],
        weight=[s.weight for s in stages],
        transfer=transfer,
    )

    def run(count: int) -> float:
        built = lower(build(name, p, count, layout.chunks))
        return simulate(built, costs, events=False).makespan

    rounds = m // p
    if rounds <= 4 or m % p:
        if m > 6 * p:
            return closed_makespan(layout, stages, transfer)
        return run(m)
    short, long = run(2 * p), run(3 * p)
    return long + (rounds - 3) * (long - short)


def step_time(
    shape: ModelShape,
    layout: RunLayout,
    hardware: Hardware,
    software: Software,
    constants: Constants,
    *,
    replay: bool = False,
) -> StepTime:
    """Predict the seconds of one step."""
    model = StepModel(shape, layout, hardware, software, constants)
    stages = model.stages()
    plain = stages
    exposed = 0.0
    if layout.zero >= 2 and layout.shard > 1 and layout.pipeline == 1:
        stages, exposed = model.sharded(stages)
    size = 2.0 * model.tokens * shape.hidden
    if layout.sequence or (software.split_transfers and layout.tensor > 1):
        size /= layout.tensor
    transfer = model.stage.send(size, constants)
    blocked = 0.0
    if layout.pipeline > 1 and software.blocking_transfers:
        blocked = 2 * transfer * layout.chunks * layout.microbatches
    make = replayed_makespan if replay else closed_makespan
    span = make(layout, stages, transfer)
    busiest = layout.microbatches * max(
        sum(plain[s].forward + plain[s].backward for s in range(r, len(plain), layout.pipeline))
        for r in range(layout.pipeline)
    )
    reduce = model.reduced(plain)
    optimizer = model.optimizer()
    nodes = max(1.0, layout.gpus / hardware.node)
    slow = constants.straggle * math.log2(nodes)
    total = (span + blocked) * (1 + slow) + reduce + optimizer + constants.step
    waiting = layout.microbatches * max(s.tensor for s in plain) * layout.chunks
    parts = {
        "compute": busiest - waiting,
        "tensor": waiting,
        "shard": exposed * layout.microbatches,
        "replicate": reduce,
        "pipeline": blocked,
        "bubble": max(0.0, span - busiest - exposed * layout.microbatches),
        "optimizer": optimizer,
        "other": constants.step + slow * (span + blocked),
    }
    flops = shape.flops() * shape.seq * layout.batch / layout.gpus
    return StepTime(total, parts, flops)
