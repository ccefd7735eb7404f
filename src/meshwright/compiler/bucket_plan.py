"""Buckets of the marked gradients of a graph: fixed by parameter index.

Buckets do not depend on the order of a graph's nodes, so ranks whose graphs are ordered differently
have the same buckets in the same order. The sizes are those of eager mode (`plan_buckets`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from meshwright.comm.graphs.marks import GRAD_REDUCE
from meshwright.data_parallel.replicas.bucket_layout import GradientSlot, plan_buckets

ALONE_BYTES = 2**20
"""A gradient of at least this size is reduced alone."""


@dataclass(frozen=True, slots=True)
class GradientMark:
    """One marked gradient of a graph, with the arguments of its `grad_reduce`."""

    node: fx.Node
    gradient: fx.Node
    index: int
    ranks: int
    group: str
    model: str
    mode: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the gradient."""
        return math.prod(self.value.shape) * self.value.dtype.itemsize

    @property
    def value(self) -> torch.Tensor:
        """The gradient as the trace saw it: shape, strides and dtype."""
        return self.gradient.meta["val"]


@dataclass(frozen=True, slots=True)
class CompiledBucket:
    """Gradients of one model and dtype that one collective reduces, descending in index."""

    marks: tuple[GradientMark, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of its parameters."""
        return tuple(mark.index for mark in self.marks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reduction."""
        return self.marks[0].value.dtype

    @property
    def bytes(self) -> int:
        """The bytes of its gradients."""
        return sum(mark.bytes for mark in self.marks)

    @property
    def parts(self) -> tuple[tuple[GradientMark, ...], ...]:
        """The marks of each collective: small gradients together, then large ones in place.

        Gloo copies coalesced gradients into a buffer and back. In mode "concat" all are in one
        collective, whose buffer keeps the means.
        """
        if self.marks[0].mode == "concat":
            return (self.marks,)
        small = tuple(mark for mark in self.marks if mark.bytes < ALONE_BYTES)
        large = tuple((mark,) for mark in self.marks if mark.bytes >= ALONE_BYTES)
        return (small, *large) if small else large


def marks_of(graph: fx.Graph) -> list[GradientMark]:
    """List the marks of ``graph``, in the order of its nodes."""
    found: list[GradientMark] = []
    for node in graph.find_nodes(op="call_function", target=GRAD_REDUCE):
        *others, sizes = cast("tuple[Any, ...]", node.args)
        found.append(GradientMark(node, *others, sizes=tuple(sizes)))
    return found


def plan_marks(marks: Iterable[GradientMark]) -> list[CompiledBucket]:
    """Assign ``marks`` to buckets, in the order in which each group reduces them.

    If a graph has several gradients of one parameter, one for each call of its module, they go into
    separate rounds.
    """
    rounds: dict[tuple[str, str, int], list[GradientMark]] = {}
    met: dict[tuple[str, str, int], int] = {}
    for mark in marks:
        key = (mark.group, mark.model, mark.index)
        met[key] = met.get(key, 0) + 1
        rounds.setdefault((mark.group, mark.model, met[key]), []).append(mark)
    return [bucket for key in sorted(rounds) for bucket in _buckets(rounds[key])]


def _buckets(marks: Sequence[GradientMark]) -> list[CompiledBucket]:
    by_index = {mark.index: mark for mark in marks}
    first = marks[0].sizes
    slots = [
        GradientSlot(
            index=mark.index,
            name=str(mark.index),
            shape=tuple(mark.value.shape),
            dtype=mark.value.dtype,
        )
        for mark in marks
    ]
    layouts = plan_buckets(slots, first_bytes=0, cap_bytes=0, listed_bytes=first)
    found = [CompiledBucket(tuple(by_index[s.index] for s in layout.slots)) for layout in layouts]
    # Buckets with larger indices complete first in a backward pass.
    return sorted(found, key=lambda bucket: -min(bucket.indices))


def describe(buckets: Sequence[CompiledBucket]) -> str:
    """Describe plans as a text that ranks compare: mode, and dtype and indices of each bucket."""
    rows = [[str(b.dtype).removeprefix("torch."), list(b.indices)] for b in buckets]
    return json.dumps([buckets[0].marks[0].mode, rows], separators=(",", ":"))
