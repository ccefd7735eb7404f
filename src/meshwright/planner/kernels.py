"""Seconds of a layer and of the output layer: products, attention, what lies between, collectives.

A product takes the larger of its work and its memory traffic (Williams et al. 2009, the roofline),
at a share of the measured ceiling that falls with its smallest dim and with tiles that do not fill
the processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from meshwright.planner.constants import Constants
from meshwright.planner.hardware import Hardware
from meshwright.planner.layouts import RunLayout, Software
from meshwright.planner.network import Group
from meshwright.planner.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one microbatch in a layer or a stage."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    waiting: float = 0.0
    """Of all these, for collectives of axes tensor, context and expert."""

    def plus(self, other: PassTimes, times: float = 1.0) -> PassTimes:
        """Add ``other``, ``times`` over."""
        return PassTimes(
            self.forward + times * other.forward,
            self.input + times * other.input,
            self.weight + times * other.weight,
            self.waiting + times * other.waiting,
        )

    __add__ = plus

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.input + self.weight


# Rows and columns of a tile, and the share of the best rate that products of such tiles reach.
_TILES = ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.6))


@cache
def _filled(m: int, n: int, processors: int) -> float:
    """Share of the processors' time that the tiles of an m x n product use, the best tile taken."""
    best = 0.02
    for rows, columns, share in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / processors)
        best = max(best, share * m * n / (waves * processors * rows * columns))
    return best


class Kernels:
    """Times of what one GPU computes for one microbatch in one layout."""

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
        self.tokens = layout.tokens(shape)
        self.tensor = Group(layout.tensor, 1, hardware)
        self._share: float = getattr(constants, f"product_{hardware.generation}")
        self._fused = constants.compiled if software.compiled else 1.0

    def moved(self, size: float) -> float:
        """Seconds to move ``size`` bytes of the GPU's memory."""
        return size / (self.hardware.memory_gbps * 1e9)

    def product(self, m: int, n: int, k: int, size: int = 2, count: int = 1) -> float:
        """Seconds of ``count`` products m x k by k x n of numbers of ``size`` bytes."""
        constants = self.constants
        low = min(m, n, k)
        share = self._share * low / (low + constants.half_size)
        rate = self.hardware.products[size] * (share if size > 1 else share * constants.fp8)
        work = 2.0 * m * n * k / (rate * _filled(m, n * count, self.hardware.processors))
        moved = self.moved(2.0 * (m * k + n * k + m * n))
        if size > 1:
            return count * max(work, moved)
        scaled = constants.quantize * (3 if self.software.rowwise else 1)
        return count * (max(work, moved) + self.moved(scaled * m * k))

    def attention(self) -> tuple[float, float]:
        """Seconds of forward and backward of scores and values in one layer."""
        shape, software, constants = self.shape, self.software, self.constants
        heads = max(1, shape.heads // self.layout.tensor)
        keys = (shape.seq / 2 + shape.window) if shape.window else shape.seq
        if not software.flash:
            count, seq = heads * self.layout.micro, shape.seq
            products = self.product(seq, seq, shape.head, count=count)
            products += self.product(seq, shape.head, seq, count=count)
            scores = self.moved(constants.scores * heads * self.tokens * keys)
            return products + scores, 2 * products + scores
        work = self.tokens * keys * heads * (shape.head + (shape.v_dim or shape.head))
        is_first = self.hardware.generation == "ampere"
        share = (constants.flash_first, constants.flash_second, constants.flash_third)[
            min(software.flash, 2 if is_first else 3) - 1
        ]
        if software.flash < 3 and not is_first:
            share *= constants.ported
        share *= min(1.0, shape.head / 128) ** 0.25 * shape.seq / (shape.seq + 512)
        forward = work / (self.hardware.products[2] * share)
        if self.layout.context > 1 and software.flash < 3:
            forward *= 1 + constants.ring * (1 - 1 / self.layout.context)
        slow = constants.deterministic if software.deterministic else 1.0
        return forward, 2.8 * slow * forward  # five products for two, less alike

    def _feed_forward(self, m: int, ffn: int, experts: int = 1) -> tuple[float, float]:
        """Seconds of the forward and of the weights' gradients, of ``experts`` of one size."""
        h, size, up = self.shape.hidden, self.layout.bytes, (self.shape.matrices - 1) * ffn
        forward = self.product(m, up, h, size, experts) + self.product(m, h, ffn, size, experts)
        weight = self.product(up, h, m, size, experts) + self.product(h, ffn, m, size, experts)
        return forward, weight

    def layer(self, *, moe: bool) -> PassTimes:
        """One layer, with experts or without."""
        shape, layout, constants = self.shape, self.layout, self.constants
        software, n, t, h = self.software, self.tokens, layout.tensor, shape.hidden
        products = weight = exchange = 0.0
        for rows, columns, split in shape.projections:
            if split and columns == h:
                rows = max(1, rows // t)
            elif split:
                columns = max(1, columns // t)
            products += self.product(n, columns, rows, layout.bytes)
            weight += self.product(columns, rows, n, layout.bytes)
        kernels, width = (18 if software.compiled else 30), max(1, shape.ffn // t)
        if moe:
            routed = n * shape.topk / (t if layout.sequence else 1)
            local = max(1, shape.experts // layout.expert)
            of_experts = self._feed_forward(max(1, int(routed / local)), shape.moe_ffn, local)
            products, weight = products + of_experts[0], weight + of_experts[1]
            if shape.shared_ffn:
                shared = self._feed_forward(n, max(1, shape.shared_ffn // t))
                products, weight = products + shared[0], weight + shared[1]
            products += self.moved(constants.dispatch * routed * h)
            group = Group(layout.expert, t, self.hardware)
            exchange = 2 * group.exchange(2.0 * routed * h, shape.topk, constants)
            kernels, width = kernels + 40, routed / n * shape.moe_ffn
        else:
            dense = self._feed_forward(n, width)
            products, weight = products + dense[0], weight + dense[1]
        between = n * h / (t if layout.sequence else 1)
        simple = self.moved(
            self._fused
            * constants.elementwise
            * (0.75 * between + 0.125 * n * width * (shape.matrices - 1))
        ) * (0.75 if software.parallel_block else 1.0)
        core, core_back = self.attention()
        forward = products + simple + core
        parameters = (shape.moe_parameters if moe else shape.dense_parameters) / t
        if moe:
            parameters += shape.expert_parameters / layout.expert
        weight += self.moved((6.0 if software.fused_accumulation else 10.0) * parameters)
        weight *= 1 - shape.frozen
        wait_forward, wait_back = self._waits(exchange, core, core_back)
        if software.overlap_back:
            wait_back = max(0.0, wait_back - weight)
        again = again_wait = 0.0
        if layout.recompute == "full":
            again, again_wait = forward, wait_forward
        elif layout.recompute == "selective":
            again = simple / 2 if software.flash else core
        elif layout.recompute == "operators":
            again, again_wait = products / 2 + simple, wait_forward / 2
        again *= layout.recompute_share
        again_wait *= layout.recompute_share
        # The host launches kernels one by one; in the backward 1.6 for each of the forward.
        passes = 1.6 + (layout.recompute_share if layout.recompute == "full" else 0.0)
        launch = constants.launch * kernels
        waits = wait_back + again_wait
        back = products + 2 * simple + core_back + again + weight + waits
        return PassTimes(
            self._queued(forward + wait_forward, launch),
            self._queued(back, launch * passes) - weight,
            weight,
            wait_forward + waits,
        )

    def _queued(self, kernels: float, host: float) -> float:
        """Seconds of kernels that the host launches ahead of them, or is late with."""
        less, more = sorted((kernels, host))
        return more * (1 + self.constants.uneven * (less / more) ** 3)

    def _waits(self, exchange: float, core: float, core_back: float) -> tuple[float, float]:
        """Seconds of forward and backward in which a layer waits for other ranks."""
        shape, layout, constants, software = self.shape, self.layout, self.constants, self.software
        size = 2.0 * self.tokens * shape.hidden
        if layout.sequence:
            wait = 2 * self.tensor.gather(size, constants)
        else:
            wait = self.tensor.reduce(size, constants)
        wait *= 1 if software.parallel_block else 2
        wait *= 1 - (constants.tensor_overlap if software.overlap_tensor else 0.0)
        forward = back = wait + exchange
        if layout.context > 1:
            keys = 4.0 * shape.keys / layout.tensor * layout.micro * shape.seq
            group = Group(layout.context, layout.tensor, self.hardware)
            ring = group.gather(keys, constants)
            forward += max(0.0, ring - core / 2)
            back += max(0.0, 2 * ring - core_back / 2)
        return forward, back

    def head(self, ranks: int = 1) -> PassTimes:
        """The output layer and its loss, spread over ``ranks`` of axis pipeline."""
        n, hidden = self.tokens, self.shape.hidden
        columns = max(1, self.shape.vocab // (self.layout.tensor * ranks))
        forward = self.product(n, columns, hidden)
        loss = self.moved(self._fused * 20.0 * n * columns)
        wait = self.tensor.reduce(2.0 * n * hidden, self.constants)
        weight = self.product(columns, hidden, n)
        return PassTimes(forward + loss, forward + loss / 2 + wait, weight, wait)
