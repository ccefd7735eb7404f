"""Properties that a pass must not change: checked on every graph after it ran."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from meshwright.comm.graphs.marks import ALL_REDUCE, ALL_REDUCE_COALESCED, ALL_REDUCE_IN_PLACE, WAIT
from meshwright.compiler.bucket_plan import BucketPlan
from meshwright.errors import InternalError
from meshwright.torch_internals.tensors import storage_id
from meshwright.torch_internals.trees import tree_leaves

_REDUCTIONS = (ALL_REDUCE, ALL_REDUCE_IN_PLACE, ALL_REDUCE_COALESCED)
_IN_PLACE = (*_REDUCTIONS, WAIT, operator.getitem)


def check_buckets(graph: fx.Graph, plans: Sequence[BucketPlan], before: int) -> None:
    """Check ``graph`` after its marks have become ``plans``; ``before`` were its `peak_bytes`.

    The graph is well formed; each group reduces the planned bytes in the planned order; all waits
    come after all reductions; memory grows by no more than two copies of what is sent: one that is
    divided, and the line of a bucket whose gradients are concatenated.

    Raises InternalError, naming what does not hold.
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
    """Compute the most bytes that values of ``graph`` hold, each freed after its last use."""
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
    """List the memory of a node's value, with its bytes. Reductions run in what they are given."""
    if node.op == "output":
        return {}
    if node.target in _IN_PLACE:
        return {k: n for argument in node.all_input_nodes for k, n in before[argument].items()}
    leaves = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    return {storage_id(leaf.untyped_storage()): _size(leaf) for leaf in leaves}


def _size(tensor: torch.Tensor) -> int:
    size = tensor.untyped_storage().nbytes()
    return size if isinstance(size, int) else 0
