"""The layouts of a model on a number of GPUs: the fastest that fit, and why the others are not.

Layouts whose states alone do not fit are left out family by family; the rest are counted in closed
form, and the best are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware
from meshwright.planner.kernels import Kernels, PassTimes
from meshwright.planner.layouts import (
    V_SCHEDULES,
    RunLayout,
    Software,
    rank_layers,
    rank_parameters,
)
from meshwright.planner.memory import (
    GIB,
    USABLE,
    RankMemory,
    flights,
    layer_activations,
    rank_memory,
    states,
)
from meshwright.planner.shapes import ModelShape
from meshwright.planner.steps import (
    StepTime,
    beside,
    data_seconds,
    exposed,
    is_built,
    shard_seconds,
    step_time,
)

OURS = Software(
    fused_accumulation=False, logits_bytes=14, eager=True, workspace_gib=1.0, fragments=0.03
)
"""What a training by Meshwright does."""

SCHEDULES = (
    *((name, 1) for name in ("1f1b", "gpipe", "zb1p", "zb2p")),
    *(("interleaved1f1b", chunks) for chunks in (2, 3, 4, 6, 8)),
    *(("loopedbfs", chunks) for chunks in (2, 4)),
    *((name, 2) for name in V_SCHEDULES),
)
"""Names and chunks of a rank."""
RECOMPUTE = (("none", 0.0), *(("full", eighth / 8) for eighth in range(1, 9)))
Choice = tuple[int, str, float, str, int]
"""Sequences of a microbatch, recompute and its share, schedule and chunks."""
SHORTLIST = 40
"""Layouts that are predicted in full."""
REPLAYED = 4
"""Of these, those whose schedules are simulated at most: until the fastest is one of them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, and what the planner says of it."""

    layout: RunLayout
    memory: RankMemory
    time: StepTime


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    best: Candidate | None
    pareto: tuple[Candidate, ...]
    """From the fastest to the one with the least memory."""
    considered: int
    fitting: int
    least: RankMemory | None
    """Of the layout that comes closest to fitting."""


def _divisors(count: int, most: int) -> list[int]:
    return [size for size in range(1, min(count, most) + 1) if count % size == 0]


def families(shape: ModelShape, gpus: int, batch: int) -> Iterator[RunLayout]:
    """All degrees: layouts that differ in no size of a weight, of one rank's or of all."""
    for tensor in _divisors(math.gcd(shape.heads, shape.kv_heads or shape.heads), 64):
        for pipeline in _divisors(gpus, shape.layers):
            for context in (1, 2, 4, 8, 16):
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or not data or batch % data or (context > 1 and shape.seq % (2 * context)):
                    continue
                for expert in _divisors(math.gcd(shape.experts or 1, data), data):
                    for shard in _divisors(data, data):
                        for zero in (0,) if shard == 1 else (3,) if pipeline > 1 else (2, 3):
                            yield RunLayout(
                                replicate=data // shard,
                                shard=shard,
                                zero=zero,
                                tensor=tensor,
                                sequence=tensor > 1,
                                pipeline=pipeline,
                                context=context,
                                expert=expert,
                            )


def best_layouts(
    shape: ModelShape,
    gpus: int,
    hardware: Hardware,
    *,
    batch: int,
    software: Software = OURS,
    constants: Constants | None = None,
    bytes: int = 2,
) -> Found:
    """Find the fastest layout of ``batch`` sequences a step on ``gpus`` that fits each of them."""
    capacity = USABLE * hardware.memory_gib * GIB / (1 + software.fragments)
    constants = constants or hardware.constants
    searcher = _Searcher(shape, hardware, software, constants, capacity, batch, bytes)
    heap: list[tuple[float, int, RunLayout]] = []
    front: dict[int, tuple[float, RunLayout]] = {}
    for family in families(shape, gpus, batch):
        for seconds, memory, choice in searcher.estimates(family):
            bucket = int(16 * memory / capacity)
            is_first = bucket not in front or seconds < front[bucket][0]
            if not is_first and len(heap) == SHORTLIST and -seconds <= heap[0][0]:
                continue
            layout = searcher.layout(family, *choice)
            if is_first:
                front[bucket] = seconds, layout
            entry = (-seconds, searcher.fitting, layout)
            if len(heap) < SHORTLIST:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
    shortlist = {layout for _, _, layout in heap} | {layout for _, layout in front.values()}
    found = [searcher.candidate(layout) for layout in shortlist]
    found = sorted((c for c in found if c.memory.total <= capacity), key=_seconds)
    replayed: set[RunLayout] = set()
    while found and found[0].layout not in replayed and len(replayed) < REPLAYED:
        replayed.add(found[0].layout)
        found[0] = searcher.candidate(found[0].layout, replay=True)
        found.sort(key=_seconds)
    pareto: list[Candidate] = []
    for candidate in found:
        if not pareto or candidate.memory.total < 0.97 * pareto[-1].memory.total:
            pareto.append(candidate)
    return Found(
        found[0] if found else None,
        tuple(pareto),
        searcher.considered,
        searcher.fitting,
        rank_memory(shape, searcher.least, software) if searcher.least else None,
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.time.total


class _PipelineEnd(NamedTuple):
    """A rank at an end of the pipeline."""

    layers: int
    states: float
    dense: float
    expert: float


class _Searcher:
    """Estimates, with what several layouts share computed once."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        software: Software,
        constants: Constants,
        capacity: float,
        batch: int,
        bytes: int,
    ) -> None:
        self._shape, self._hardware, self._software = shape, hardware, software
        self._constants, self._capacity = constants, capacity
        self._batch, self._bytes = batch, bytes
        self.considered = self.fitting = 0
        self.least: RunLayout | None = None
        self._least_bytes = math.inf
        self._layers: dict[tuple[object, ...], tuple[PassTimes, PassTimes, float, float]] = {}

    def candidate(self, layout: RunLayout, *, replay: bool = False) -> Candidate:
        """Predict all of one layout."""
        shape, software = self._shape, self._software
        asked = shape, layout, self._hardware, software, self._constants
        return Candidate(
            layout, rank_memory(shape, layout, software), step_time(*asked, replay=replay)
        )

    def estimates(self, family: RunLayout) -> Iterator[tuple[float, float, Choice]]:
        """Yield (seconds, bytes, choice) of what fits, in closed form."""
        shape, software, p = self._shape, self._software, family.pipeline
        each = self._batch // family.data
        micros = [micro for micro in (1, 2, 4, 8, 16) if each % micro == 0]
        names = [s for s in SCHEDULES if p > 1 and p * s[1] <= shape.layers] or [("1f1b", 1)]
        self.considered += len(micros) * len(names) * len(RECOMPUTE)
        loop = self._ends(family)
        floor = max(end.states for end in loop)
        if floor > self._capacity:
            if floor < self._least_bytes:
                self._least_bytes = floor
                self.least = self.layout(family, micros[0], "full", 1.0, *names[0])
            return
        bend = self._ends(replace(family, schedule="zbv", chunks=2)) if p > 1 else loop
        kernels = Kernels(shape, family, self._hardware, software, self._constants)
        travel = max(data_seconds(kernels, end.dense, end.expert) for end in loop)
        sharded = shard_seconds(kernels) if p == 1 and family.is_fully_sharded else None
        vocab = software.logits_bytes * shape.seq * shape.vocab / (family.context * family.tensor)
        for micro in micros:
            count = each // micro
            schedules = [
                (
                    name,
                    chunks,
                    bend if name in V_SCHEDULES else loop,
                    flights(name, p, chunks, count, 0) / chunks,
                    flights(name, p, chunks, count, p - 1) / chunks,
                )
                for name, chunks in names
                if is_built(name, p, count)
            ]
            for how, share in RECOMPUTE:
                layer, head, kept, live = self._layer(family, micro, how, share)
                spare = max(0.0, layer.forward + layer.input - 2 * layer.weight) / layer.both
                late = (layer.forward + layer.input - layer.weight) / layer.both
                fills = {
                    "zb1p": late,
                    "zb2p": max(spare, layer.forward / layer.both),
                    "zbv": spare,
                    "dualpipev": spare,
                    "vhalf": 2 * late + 0.25,
                    "vmin": 4 / 3,
                }
                even = 3 * max(layer.forward, layer.input, layer.weight) - layer.both
                for name, chunks, (first, last), flying, landing in schedules:
                    memory = max(
                        first.states + first.layers * kept * flying,
                        last.states + last.layers * kept * landing + micro * vocab,
                    )
                    memory += live
                    if memory > self._capacity:
                        if memory < self._least_bytes:
                            self._least_bytes = memory
                            self.least = self.layout(family, micro, how, share, name, chunks)
                        continue
                    self.fitting += 1
                    choice = micro, how, share, name, chunks
                    if p == 1:
                        forward = shape.layers * layer.forward + head.forward
                        back = shape.layers * layer.both + head.both - forward
                        if sharded:
                            forward = beside(forward, sharded[0], self._constants) + sharded[2]
                            back = beside(back, sharded[1], self._constants)
                        wait = exposed(kernels, travel, forward + back)
                        yield count * (forward + back) + wait, memory, choice
                        continue
                    most = first.layers * layer.both
                    slowest = max(most, last.layers * layer.both + head.both)
                    fill = (p - 1) * most / chunks
                    fill *= fills.get(name, 1.0)
                    if name == "vmin":  # a slot is as long as the longest of F, I and W
                        fill += count * first.layers * even
                    wait = exposed(kernels, travel, slowest)
                    yield count * slowest + fill + wait, memory, choice

    def _ends(self, family: RunLayout) -> tuple[_PipelineEnd, _PipelineEnd]:
        """The first and the last rank of axis pipeline."""
        found = []
        for rank in (0, family.pipeline - 1):
            dense, expert = rank_parameters(self._shape, family, rank)
            parts = states(self._shape, family, self._software, dense, expert)
            total = sum(parts.values()) + self._software.workspace_gib * GIB
            layers = sum(rank_layers(self._shape, family, rank))
            found.append(_PipelineEnd(layers, total, dense, expert))
        return found[0], found[1]

    def layout(
        self, family: RunLayout, micro: int, how: str, share: float, schedule: str, chunks: int
    ) -> RunLayout:
        """A layout of a family."""
        return replace(
            family,
            micro=micro,
            microbatches=self._batch // (family.data * micro),
            recompute=how,
            recompute_share=share,
            schedule=schedule,
            chunks=chunks,
            bytes=self._bytes,
        )

    def _layer(
        self, family: RunLayout, micro: int, how: str, share: float
    ) -> tuple[PassTimes, PassTimes, float, float]:
        """Times of a layer and of the output layer; bytes that a layer keeps, and while it runs."""
        key = family.tensor, family.context, family.expert, micro, how, share
        if key not in self._layers:
            shape, software = self._shape, self._software
            layout = self.layout(family, micro, how, share, "1f1b", 1)
            kernels = Kernels(shape, layout, self._hardware, software, self._constants)
            moe = bool(shape.moe_layers)
            whole = layer_activations(shape, layout, software, moe=moe, recompute="none")
            kept = layer_activations(shape, layout, software, moe=moe, recompute=how)
            self._layers[key] = (
                kernels.layer(moe=moe),
                kernels.head(),
                share * kept + (1 - share) * whole,
                whole if how == "full" else 0.0,
            )
        return self._layers[key]


def neighbors(
    found: Found, shape: ModelShape, hardware: Hardware, batch: int, software: Software = OURS
) -> list[str]:
    """Say of each layout that is one change away from the best why it is not the best."""
    best = found.best
    if best is None:
        return []
    lines = []
    for what, layout in _changes(best.layout, shape, batch):
        memory = rank_memory(shape, layout, software)
        needs = memory.total * (1 + software.fragments) / GIB
        if needs > USABLE * hardware.memory_gib:
            where = f"stage {memory.rank} " if layout.pipeline > 1 else ""
            lines.append(
                f"{what}: {where}needs {needs:.0f} of {hardware.memory_gib:.0f} GiB, most of it "
                f"{memory.largest}"
            )
            continue
        time = step_time(shape, layout, hardware, software, hardware.constants)
        more = time.total / best.time.total - 1
        part = max(time.parts, key=lambda name: time.parts[name] - best.time.parts[name])
        crosses = layout.tensor > hardware.node and "crosses the node, "
        lines.append(
            f"{what}: {crosses or ''}{more:+.0%}, {part} {best.time.parts[part]:.3g} -> "
            f"{time.parts[part]:.3g} s"
        )
    return lines


def _changes(best: RunLayout, shape: ModelShape, batch: int) -> Iterator[tuple[str, RunLayout]]:
    """Layouts with one degree doubled or halved, and its data ranks made to suit."""
    for name in ("tensor", "pipeline", "context", "shard", "micro"):
        old = getattr(best, name)
        for new in (old * 2, old // 2):
            changed = replace(best, **{name: new}) if new and (old % 2 == 0 or new > old) else None
            if changed is None or shape.heads % changed.tensor or changed.stages > shape.layers:
                continue
            data, rest = divmod(best.gpus, changed.tensor * changed.pipeline * changed.context)
            if rest or not data or batch % (data * changed.micro):
                continue
            shard = changed.shard if name == "shard" else min(best.shard, data)
            if data % shard:
                continue
            yield (
                f"{name} = {new}",
                replace(
                    changed,
                    shard=shard,
                    replicate=data // shard,
                    zero=(best.zero or 3) if shard > 1 else 0,
                    microbatches=batch // (data * changed.micro),
                    sequence=changed.tensor > 1,
                    chunks=best.chunks if changed.pipeline > 1 else 1,
                    schedule=best.schedule if changed.pipeline > 1 else "1f1b",
                ),
            )
    if best.recompute == "none":
        yield "recompute", replace(best, recompute="full", recompute_share=1.0)
    else:
        yield "no recompute", replace(best, recompute="none", recompute_share=0.0)
