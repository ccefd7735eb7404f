"""The layouts of a model on a number of GPUs: the fastest that fit, and why the others are not.

Layouts whose states alone do not fit are left out family by family; the rest are counted in closed
form, and the best are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from meshwright.errors import PlanError
from meshwright.planner.hardware import Hardware
from meshwright.planner.kernels import Kernels, PassTimes
from meshwright.planner.layouts import (
    RunLayout,
    Software,
    can_cut,
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
from meshwright.planner.software import OURS
from meshwright.planner.steps import (
    StepTime,
    beside,
    data_seconds,
    drain,
    exposed,
    is_built,
    longer,
    shard_seconds,
    step_time,
)
from meshwright.schedule.builders import V_SHAPED
from meshwright.settings import Origin
from meshwright.toml_source import review

SCHEDULES = (
    *((name, 1) for name in ("1f1b", "gpipe", "zb1p", "zb2p")),
    *(("interleaved1f1b", chunks) for chunks in (2, 3, 4, 6, 8)),
    *(("loopedbfs", chunks) for chunks in (2, 4)),
    *((name, 2) for name in V_SHAPED),
)
"""Names and chunks of a rank."""
Choice = tuple[int, float, str, int]
"""Sequences of a microbatch, the share of layers that recompute, schedule and chunks."""
SHORTLIST = 40
"""Layouts that are predicted in full."""
REPLAYED = 4
"""Of these, those whose schedules are simulated at most: until the fastest is one of them."""


_SECONDS = attrgetter("time.total")


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
    splits = math.gcd(shape.heads, shape.kv_heads or shape.heads)
    experts = (shape.experts or 1) if can_cut(shape, "expert") else 1
    for tensor in _divisors(splits if can_cut(shape, "tensor") else 1, 64):
        for pipeline in _divisors(gpus, shape.layers if can_cut(shape, "pipeline") else 1):
            for context in (1, 2, 4, 8, 16) if can_cut(shape, "context") else (1,):
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or not data or batch % data or (context > 1 and shape.seq % (2 * context)):
                    continue
                for expert in _divisors(math.gcd(experts, data), data):
                    for shard in _divisors(data // expert, data):
                        sharers = shard * expert if shard > 1 else 1
                        for zero in (0,) if shard == 1 else (3,) if pipeline > 1 else (2, 3):
                            yield RunLayout(
                                replicate=data // sharers,
                                shard=sharers,
                                zero=zero,
                                tensor=tensor,
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
) -> Found:
    """Find the fastest layout of ``batch`` sequences a step on ``gpus`` that fits each of them.

    Raises ``PlanError`` for impossible numbers, of ``hardware`` too.
    """
    if not all(isinstance(size, int) and size > 0 for size in (gpus, batch)):
        raise PlanError(f"expected whole numbers of GPUs and sequences, found {gpus} and {batch}")
    if problems := review(hardware, Origin(hardware.name)):
        raise Origin(hardware.name).error(problems)
    capacity = USABLE * hardware.memory_gib * GIB / (1 + software.fragments)
    searcher = Searcher(shape, hardware, software, capacity, batch)
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
    found = sorted((c for c in found if c.memory.total <= capacity), key=_SECONDS)
    replayed: set[RunLayout] = set()
    while found and found[0].layout not in replayed and len(replayed) < REPLAYED:
        replayed.add(found[0].layout)
        found[0] = searcher.candidate(found[0].layout, replay=True)
        found.sort(key=_SECONDS)
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


class _PipelineEnd(NamedTuple):
    """A rank at an end of the pipeline."""

    layers: tuple[int, int]
    """Without experts, and with."""
    states: float
    dense: float
    expert: float


@dataclass(slots=True)
class Searcher:
    """Estimates, with what several layouts share computed once."""

    shape: ModelShape
    hardware: Hardware
    software: Software
    capacity: float
    batch: int
    considered: int = 0
    fitting: int = 0
    least: RunLayout | None = None
    """The layout that comes closest to fitting."""
    least_bytes: float = math.inf
    layers: dict[tuple[object, ...], tuple[PassTimes, float, float]] = field(default_factory=dict)

    def candidate(self, layout: RunLayout, *, replay: bool = False) -> Candidate:
        """Predict all of one layout."""
        shape, software = self.shape, self.software
        asked = shape, layout, self.hardware, software, self.hardware.constants
        return Candidate(
            layout, rank_memory(shape, layout, software), step_time(*asked, replay=replay)
        )

    def estimates(self, family: RunLayout) -> Iterator[tuple[float, float, Choice]]:
        """Yield (seconds, bytes, choice) of what fits, in closed form."""
        shape, software, p = self.shape, self.software, family.pipeline
        hardware, constants = self.hardware, self.hardware.constants
        each = self.batch // family.data
        micros = [micro for micro in (1, 2, 4, 8, 16) if each % micro == 0]
        names = [s for s in SCHEDULES if p > 1 and p * s[1] <= shape.layers] or [("1f1b", 1)]
        is_traced = software.traced_stages and p > 1
        counts = [len(_shares(shape.layers, p * chunks)) for _, chunks in names]
        self.considered += len(micros) * sum(counts)
        loop = self._ends(family)
        floor = max(end.states for end in loop)
        if floor > self.capacity:
            self._spoil(floor, family, (micros[0], float(not is_traced), *names[0]))
            return
        ends = {s: self._ends(replace(family, schedule=s[0], chunks=s[1])) for s in names}
        kernels = Kernels(shape, family, hardware, software, constants)
        travel = max(data_seconds(kernels, end.dense, end.expert) for end in loop)
        kept = max(family.kept(end.dense, end.expert) for end in loop)
        rest = kernels.moved(constants.optimizer * kept)
        sharded = shard_seconds(kernels) if p == 1 and family.is_fully_sharded else None
        for micro in micros:
            count = each // micro
            sized = replace(family, micro=micro)
            head = Kernels(shape, sized, hardware, software, constants).head()
            tokens = sized.tokens(shape)
            logits = software.logits_bytes * tokens * shape.vocab
            logits /= 1 if software.whole_logits else family.tensor
            embed = 2.0 * tokens * shape.hidden * min(count, p) if p > 1 else 0.0
            made: dict[tuple[float, object], tuple[PassTimes, float, float, PassTimes, float]] = {}
            for name, chunks in names:
                if not is_built(name, p, count):
                    continue
                first, last = ends[name, chunks]
                is_first = name in V_SHAPED  # it has the output layer, too
                flying = flights(name, p, chunks, count, 0) / chunks
                landing = flights(name, p, chunks, count, p - 1) / chunks
                for share in _shares(shape.layers, p * chunks)[: 1 if is_traced else None]:
                    key = share, (first.layers, last.layers)
                    if key not in made:
                        made[key] = (
                            *self._rank(family, micro, share, first.layers),
                            *self._rank(family, micro, share, last.layers)[:2],
                        )
                    work, kept, live, last_work, last_kept = made[key]
                    memory = live + max(
                        first.states + kept * flying + embed + is_first * logits,
                        last.states + last_kept * landing + (not is_first) * logits,
                    )
                    choice = micro, share, name, chunks
                    if memory > self.capacity:
                        self._spoil(memory, family, choice)
                        continue
                    self.fitting += 1
                    slowest = max(
                        work.both + is_first * head.both,
                        last_work.both + (not is_first) * head.both,
                    )
                    free, fill = slowest, 0.0
                    if p == 1:
                        forward = work.forward + head.forward
                        back = slowest - forward
                        if sharded:
                            free -= sharded[0] + sharded[1]
                            forward = beside(forward, sharded[0], constants) + sharded[2]
                            back = beside(back, sharded[1], constants)
                        slowest = forward + back
                    else:
                        fill = (p - 1 / chunks) * drain(name, chunks, work)
                        fill += count * longer(name, work) / 2
                    wait = exposed(kernels, travel, free)
                    yield count * slowest + fill + wait + rest, memory, choice

    def _spoil(self, memory: float, family: RunLayout, choice: Choice) -> None:
        """Remember the layout that comes closest to fitting."""
        if memory < self.least_bytes:
            self.least_bytes = memory
            self.least = self.layout(family, *choice)

    def _ends(self, family: RunLayout) -> tuple[_PipelineEnd, _PipelineEnd]:
        """The first and the last rank of axis pipeline."""
        found = []
        for rank in (0, family.pipeline - 1):
            dense, expert = rank_parameters(self.shape, family, rank)
            parts = states(self.shape, family, self.software, dense, expert)
            total = sum(parts.values()) + self.software.workspace_gib * GIB
            layers = rank_layers(self.shape, family, rank)
            found.append(_PipelineEnd(layers, total, dense, expert))
        return found[0], found[1]

    def layout(
        self, family: RunLayout, micro: int, share: float, schedule: str, chunks: int
    ) -> RunLayout:
        """A layout of a family."""
        return replace(
            family,
            micro=micro,
            microbatches=self.batch // (family.data * micro),
            recompute="full" if share else "none",
            recompute_share=share,
            schedule=schedule,
            chunks=chunks,
        )

    def _rank(
        self, family: RunLayout, micro: int, share: float, layers: tuple[int, int]
    ) -> tuple[PassTimes, float, float]:
        """Times of a rank's layers; bytes that they keep, and one more while it runs."""
        work, kept, live = PassTimes(), 0.0, 0.0
        for moe, count in enumerate(layers):
            if count:
                times, of_layer, running = self._layer(family, micro, share, moe=bool(moe))
                work = work.plus(times, count)
                kept, live = kept + count * of_layer, max(live, running)
        return work, kept, live

    def _layer(
        self, family: RunLayout, micro: int, share: float, *, moe: bool
    ) -> tuple[PassTimes, float, float]:
        key = family.tensor, family.context, family.expert, micro, share, moe
        if key not in self.layers:
            shape, software = self.shape, self.software
            layout = self.layout(family, micro, share, "1f1b", 1)
            kernels = Kernels(shape, layout, self.hardware, software, self.hardware.constants)
            whole = layer_activations(shape, layout, software, moe=moe, recompute="none")
            kept = layer_activations(shape, layout, software, moe=moe, recompute="full")
            self.layers[key] = (
                kernels.layer(moe=moe),
                share * kept + (1 - share) * whole,
                whole if share else 0.0,
            )
        return self.layers[key]


@cache
def _shares(layers: int, stages: int) -> tuple[float, ...]:
    """Shares of the layers of a stage: whole ones, and twelfths where there are as many."""
    most = math.ceil(layers / stages)
    return 0.0, *dict.fromkeys(math.ceil(most * n / 12) / most for n in range(1, 13))


def neighbors(
    found: Found, shape: ModelShape, hardware: Hardware, batch: int, software: Software = OURS
) -> list[str]:
    """Say of each layout that is one change away from the best why it is not the best."""
    best = found.best
    if best is None:
        return []
    lines = []
    for what, layout in changes(best.layout, shape, batch, software):
        memory = rank_memory(shape, layout, software)
        needs = memory.total * (1 + software.fragments) / GIB
        if needs > USABLE * hardware.memory_gib:
            where = f"rank {memory.rank} of axis pipeline " if layout.pipeline > 1 else ""
            lines.append(
                f"{what}: {where}needs {needs:.3g} of {USABLE * hardware.memory_gib:.3g} usable "
                f"GiB, most of it {memory.largest}"
            )
            continue
        time = step_time(shape, layout, hardware, software, hardware.constants, replay=True)
        more = time.total / best.time.total - 1
        part = max(time.parts, key=lambda name: time.parts[name] - best.time.parts[name])
        crosses = "crosses the node, " if layout.tensor > hardware.node else ""
        lines.append(
            f"{what}: {crosses}{more:+.0%}, {part} {best.time.parts[part]:.3g} -> "
            f"{time.parts[part]:.3g} s"
        )
    return lines


def changes(
    best: RunLayout, shape: ModelShape, batch: int, software: Software
) -> Iterator[tuple[str, RunLayout]]:
    """Proposed layouts with one degree doubled or halved, and axis shard made to suit."""
    known = [(family.axes, family) for family in families(shape, best.gpus, batch)]
    own = {n: best.axes.get(n, 1) for n in ("tensor", "pipeline", "context", "expert", "shard")}
    degrees = {**own, "micro": best.micro}
    for name, new in ((n, each) for n, d in degrees.items() for each in (2 * d, d / 2)):
        wanted = {**degrees, name: new}
        micro, shard = wanted.pop("micro"), wanted.pop("shard")
        close = [f for axes, f in known if all(axes.get(n, 1) == wanted[n] for n in wanted)]
        exact = [f for f in close if f.axes.get("shard", 1) == shard]
        found = exact if name == "shard" else exact or close
        family = max(found, key=lambda f: (f.shard, f.zero == best.zero), default=None)
        if family is None or batch % (family.data * micro) or micro < 1:
            continue
        is_flat, count = family.pipeline == 1, int(batch // (family.data * micro))
        schedule, chunks = ("1f1b", 1) if is_flat else (best.schedule, best.chunks)
        layers = shape.layers / (family.pipeline * chunks)
        if layers < 1 or not (is_flat or is_built(schedule, family.pipeline, count)):
            continue
        layers = math.ceil(layers)
        changed = replace(
            family,
            micro=int(micro),
            microbatches=count,
            schedule=schedule,
            chunks=chunks,
            recompute=best.recompute,
            recompute_share=math.ceil(best.recompute_share * layers - 1e-9) / layers,
        )
        if is_flat or changed.recompute == "none" or not software.traced_stages:
            yield f"{name} = {new:g}", changed
    if best.pipeline > 1 and software.traced_stages:
        return
    if best.recompute == "none":
        yield "recompute", replace(best, recompute="full", recompute_share=1.0)
    else:
        yield "no recompute", replace(best, recompute="none", recompute_share=0.0)
