"""The pass that replaces the marks of a graph by fused reductions, started early, awaited late.

::

    g3 -> mark -> copy_        g3 ┐
    g2 -> mark -> copy_   ->   g2 ┴ divide, agree, reduce bucket 0
    g1 -> mark -> copy_        g1 ─ divide, reduce bucket 1
                               wait, copy_ (all of bucket 0), wait, copy_ (of bucket 1)

A reduction comes after the last of its bucket's gradients, and buckets of one group in the order of
the plan. Nodes that need a mean move behind all others, each wait before the first use. Every graph
is checked afterwards.

Buckets are fixed by parameter index. They do not depend on the order of a graph's nodes, so ranks
whose graphs are ordered differently have the same buckets in the same order. The sizes are those of
eager mode (`plan_buckets`).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from meshwright.comm.graphs.marks import (
    AGREE,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_REDUCE_IN_PLACE,
    DIVIDED,
    GRAD_REDUCE,
    WAIT,
)
from meshwright.data_parallel.replicas.bucket_layout import GradientSlot, plan_buckets
from meshwright.errors import InternalError
from meshwright.torch_internals.compile import detect_fake_mode
from meshwright.torch_internals.tensors import storage_id
from meshwright.torch_internals.trees import tree_leaves

ALONE_BYTES = 2**20
"""A gradient of at least this size is reduced alone, except in mode "concat"."""


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
        return math.prod(self.value.shape) * self.value.dtype.itemsize

    @property
    def value(self) -> torch.Tensor:
        """The gradient as the trace saw it: shape, strides and dtype."""
        return self.gradient.meta["val"]


@dataclass(frozen=True, slots=True)
class CompiledBucket:
    """Gradients of one model and dtype that are reduced together, descending in index."""

    marks: tuple[GradientMark, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(mark.index for mark in self.marks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reduction."""
        return self.marks[0].value.dtype

    @property
    def bytes(self) -> int:
        return sum(mark.bytes for mark in self.marks)

    @property
    def parts(self) -> tuple[tuple[GradientMark, ...], ...]:
        """The marks of each collective: small gradients together, then each large one alone.

        Gloo copies coalesced gradients into a buffer and back, but not a single one. In mode
        "concat" all are in one collective, whose buffer keeps the means.
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
    """Describe plans as text that ranks compare: mode, and dtype and indices of each bucket."""
    rows = [[str(b.dtype).removeprefix("torch."), list(b.indices)] for b in buckets]
    return json.dumps([buckets[0].marks[0].mode, rows], separators=(",", ":"))


_ATEN = torch.ops.aten
_REDUCTIONS = (ALL_REDUCE, ALL_REDUCE_IN_PLACE, ALL_REDUCE_COALESCED)
_IN_PLACE = (*_REDUCTIONS, WAIT, operator.getitem)


@dataclass(slots=True)
class _Emitted:
    """The nodes of one bucket."""

    plan: CompiledBucket
    send: list[fx.Node]
    receive: list[fx.Node]
    results: list[fx.Node]
    """The means, in the order of the marks."""


def fuse_marks(graph: fx.Graph) -> list[CompiledBucket]:
    """Replace all marks of ``graph`` by reductions of buckets; returns the buckets.

    Raises InternalError if a gradient is computed from a mean, which no backward graph does.
    """
    marks = marks_of(graph)
    if not marks:
        return []
    plans = plan_marks(marks)
    old = list(graph.nodes)
    write = Writer(graph, old[-1])
    buckets = [write.bucket(plan) for plan in plans]
    _ask_before_each_model(write, buckets)
    for bucket in buckets:
        for mark, result in zip(bucket.plan.marks, bucket.results, strict=True):
            mark.node.replace_all_uses_with(result)
            graph.erase_node(mark.node)
    gone = {mark.node for mark in marks}
    _order(old[-1], [node for node in old[:-1] if node not in gone], buckets)
    return plans


class Writer:
    """Adds nodes to a graph, each with the fake value that the trace would have given it."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph = graph
        self._before = before
        values = [node.meta["val"] for node in graph.nodes if "val" in node.meta]
        self._fake = detect_fake_mode(values)

    def call(self, target: Callable[..., Any], *args: Any, **constants: Any) -> fx.Node:
        """Insert a call of ``target`` before the end."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(target, args, constants)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        if self._fake is None:
            raise InternalError("a graph with marks holds no traced values")
        with self._fake:
            node.meta["val"] = target(*values, **constants)
        return node

    def bucket(self, plan: CompiledBucket) -> _Emitted:
        """Insert the nodes that reduce ``plan``."""
        return self._concat(plan) if plan.marks[0].mode == "concat" else self._coalesced(plan)

    def _coalesced(self, plan: CompiledBucket) -> _Emitted:
        send: list[fx.Node] = []
        receive: list[fx.Node] = []
        means: dict[GradientMark, fx.Node] = {}
        for part in plan.parts:
            group = part[0].group
            if len(part) == 1 and part[0].bytes >= ALONE_BYTES:
                items = [self._alone(part[0])]
                send += [*items[0].all_input_nodes, *items]
            else:
                divided = [self.call(_ATEN.div.Tensor, mark.gradient, mark.ranks) for mark in part]
                reduced = self.call(ALL_REDUCE_COALESCED, divided, "sum", group)
                send += [*divided, reduced]
                places = range(len(divided))
                items = [self.call(operator.getitem, reduced, place) for place in places]
                receive += items
            for mark, item in zip(part, items, strict=True):
                means[mark] = self.call(WAIT, item)
                receive.append(means[mark])
        return _Emitted(plan, send, receive, [means[mark] for mark in plan.marks])

    def _alone(self, mark: GradientMark) -> fx.Node:
        if mark.mode != "shared":  # else generated code divides in place
            divided = self.call(_ATEN.div.Tensor, mark.gradient, mark.ranks)
            return self.call(ALL_REDUCE, divided, "sum", mark.group)
        divided = self.call(DIVIDED, mark.gradient, mark.index, mark.ranks, mark.model)
        return self.call(ALL_REDUCE_IN_PLACE, divided, "sum", mark.group)

    def _concat(self, plan: CompiledBucket) -> _Emitted:
        marks = plan.marks
        flat = [self.call(_ATEN.flatten.using_ints, mark.gradient) for mark in marks]
        line = self.call(_ATEN.cat.default, flat)
        divided = self.call(_ATEN.div.Tensor, line, marks[0].ranks)
        reduced = self.call(ALL_REDUCE, divided, "sum", marks[0].group)
        mean = self.call(WAIT, reduced)
        receive: list[fx.Node] = [mean]
        results: list[fx.Node] = []
        offset = 0
        for mark in marks:
            shape = list(mark.value.shape)
            end = offset + mark.value.numel()
            part = self.call(_ATEN.slice.Tensor, mean, 0, offset, end)
            results.append(self.call(_ATEN.reshape.default, part, shape))
            receive += [part, results[-1]]
            offset = end
        return _Emitted(plan, [*flat, line, divided, reduced], receive, results)


def _ask_before_each_model(write: Writer, buckets: Sequence[_Emitted]) -> None:
    """Insert an agreement of all ranks before the first reduction of each model."""
    by_model: dict[str, list[_Emitted]] = {}
    for bucket in buckets:
        by_model.setdefault(bucket.plan.marks[0].model, []).append(bucket)
    for model, own in by_model.items():
        plans = [bucket.plan for bucket in own]
        indices = sorted({index for plan in plans for index in plan.indices})
        send = own[0].send
        place = next(n for n, node in enumerate(send) if node.target in _REDUCTIONS)
        asked = write.call(AGREE, send[place - 1], indices, model, describe(plans))
        send.insert(place, asked)


def _order(output: fx.Node, old: Sequence[fx.Node], buckets: Sequence[_Emitted]) -> None:
    """Order all nodes as drawn at the top of this file."""
    means = {node for bucket in buckets for node in bucket.receive}
    last = _with_dependents(old, means)
    queues: dict[str, list[_Emitted]] = {}
    for bucket in buckets:
        queues.setdefault(bucket.plan.marks[0].group, []).append(bucket)
    ordered: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for node in old:
        if node in last:
            continue
        ordered.append(node)
        seen.add(node)
        for queue in queues.values():
            while queue and all(mark.gradient in seen for mark in queue[0].plan.marks):
                ordered += queue.pop(0).send
    if any(queues.values()):
        raise InternalError("a marked gradient is computed from the mean of another one")
    waiting = list(buckets)
    for node in [*(node for node in old if node in last), output]:
        used = {argument for argument in node.all_input_nodes if argument in means}
        for bucket in [b for b in waiting if node is output or used.intersection(b.results)]:
            waiting.remove(bucket)
            ordered += bucket.receive
        if node is not output:
            ordered.append(node)
    for node in ordered:
        output.prepend(node)


def _with_dependents(old: Iterable[fx.Node], means: set[fx.Node]) -> set[fx.Node]:
    """Collect nodes that depend on ``means``, and those that write to the graph's inputs."""
    found: set[fx.Node] = set()
    for node in old:
        copied = node.args[0] if node.target is _ATEN.copy_.default else None
        writes_back = isinstance(copied, fx.Node) and copied.op == "placeholder"
        if writes_back or any(n in means or n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def check_buckets(graph: fx.Graph, plans: Sequence[CompiledBucket], before: int) -> None:
    """Check ``graph`` after its marks have become ``plans``; its `peak_bytes` was ``before``.

    The graph is well formed, each group reduces the planned bytes in the planned order, and memory
    grows by at most two copies of the gradients: the divided ones, and the concatenated bucket.

    Raises InternalError, naming the violation.
    """
    graph.lint()
    expected: dict[str, list[int]] = {}
    for plan in plans:
        sizes = [sum(mark.bytes for mark in part) for part in plan.parts]
        expected.setdefault(plan.marks[0].group, []).extend(sizes)
    found: dict[str, list[int]] = {}
    for node in graph.nodes:
        if node.target in _REDUCTIONS and node.args[2] in expected:
            size = sum(leaf.nbytes for leaf in tree_leaves(node.meta["val"]))
            found.setdefault(str(node.args[2]), []).append(size)
    if found != expected:
        raise InternalError(f"buckets of {expected} bytes were planned, the graph has {found}")
    allowed = before + 2 * sum(plan.bytes for plan in plans)
    after = peak_bytes(graph)
    if after > allowed:
        raise InternalError(
            f"fusing gradients raised the peak of a graph from {before} to {after} bytes; two "
            f"copies of them allow {allowed}"
        )


def peak_bytes(graph: fx.Graph) -> int:
    """Compute the peak bytes of the values of ``graph``, each freed after its last use."""
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            last_use[argument] = node
    freed: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last_use.items():
        freed.setdefault(user, []).append(node)
    held: dict[int, int] = {}
    users: dict[int, int] = {}
    storages: dict[fx.Node, dict[int, int]] = {}
    total = most = 0
    for node in graph.nodes:
        storages[node] = found = _storages(node, storages)
        for storage, size in found.items():
            if storage not in held:
                held[storage] = size
                total += size
            users[storage] = users.get(storage, 0) + 1
        most = max(most, total)
        for done in freed.get(node, ()):
            for storage in storages[done]:
                users[storage] -= 1
                if not users[storage]:
                    total -= held.pop(storage)
    return most


def _storages(node: fx.Node, before: Mapping[fx.Node, Mapping[int, int]]) -> dict[int, int]:
    """Map a node's storages to their bytes. Reductions run in place, so they have their input's."""
    if node.op == "output":
        return {}
    if node.target in _IN_PLACE:
        return {k: n for argument in node.all_input_nodes for k, n in before[argument].items()}
    leaves = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    return {storage_id(leaf.untyped_storage()): _size(leaf) for leaf in leaves}


def _size(tensor: torch.Tensor) -> int:
    size = tensor.untyped_storage().nbytes()
    return size if isinstance(size, int) else 0
