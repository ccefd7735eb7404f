"""The pass on graphs: where reductions and waits stand, and what is refused."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import fx

from meshwright.errors import InternalError
from support.compiler.graphs import chain, mark, traced
from support.internals.comm import (
    AGREE,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_REDUCE_IN_PLACE,
    DIVIDED,
    GRAD_REDUCE,
    WAIT,
)
from support.internals.compiler import ALONE_BYTES, check_buckets, fuse_marks, peak_bytes

MM = torch.ops.aten.mm.default
REDUCTIONS = (ALL_REDUCE, ALL_REDUCE_COALESCED, ALL_REDUCE_IN_PLACE)
ALONE_SIZE = math.isqrt(ALONE_BYTES // 4)
"""Square matrices of this size are large."""


def fused(graph: fx.Graph) -> list[fx.Node]:
    before = peak_bytes(graph)
    check_buckets(graph, fuse_marks(graph), before)
    assert not graph.find_nodes(op="call_function", target=GRAD_REDUCE)
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
    return list(graph.nodes)


def kinds(nodes: list[fx.Node], *targets: object) -> list[object]:
    return [node.target for node in nodes if node.target in targets]


def test_reductions_start_early_and_are_awaited_late() -> None:
    nodes = fused(chain(5))
    # 64 bytes each: the first bucket closes with one, the second with four.
    found = kinds(nodes, MM, AGREE, ALL_REDUCE_COALESCED)
    assert found == [MM, AGREE, ALL_REDUCE_COALESCED, *[MM] * 8, ALL_REDUCE_COALESCED, MM]
    positions = {node: place for place, node in enumerate(nodes)}
    reductions = [node for node in nodes if node.target is ALL_REDUCE_COALESCED]
    waits = [node for node in nodes if node.target is WAIT]
    assert [len(node.args[0]) for node in reductions] == [1, 4]
    assert len(waits) == 5
    assert min(positions[wait] for wait in waits) > positions[reductions[-1]]
    for reduction in reductions:
        gradients = [divided.args[0] for divided in reduction.args[0]]
        last = max(positions[gradient] for gradient in gradients)
        between = nodes[last + 1 : positions[reduction]]
        assert not [node for node in between if node.target is MM]


def test_large_gradients_are_reduced_in_memory_that_ranks_share() -> None:
    nodes = fused(chain(2, size=ALONE_SIZE, mode="shared"))
    targets = (DIVIDED, AGREE, *REDUCTIONS, WAIT)
    rounds = [DIVIDED, AGREE, ALL_REDUCE_IN_PLACE, DIVIDED, ALL_REDUCE_IN_PLACE]
    assert kinds(nodes, *targets) == [*rounds, WAIT, WAIT]
    for graph in (chain(2, size=ALONE_SIZE - 1, mode="shared"), chain(2, size=ALONE_SIZE)):
        assert DIVIDED not in kinds(fused(graph), *targets)


def test_concat_sends_one_line_for_each_bucket() -> None:
    nodes = fused(chain(5, mode="concat"))
    assert len(kinds(nodes, ALL_REDUCE)) == 2
    assert len(kinds(nodes, WAIT)) == 2
    output = nodes[-1].args[0]
    assert [tuple(node.meta["val"].shape) for node in output] == [(4, 4)] * 5


def test_what_uses_a_mean_comes_behind_everything_else() -> None:
    def backward(x: torch.Tensor, kept: torch.Tensor) -> list[torch.Tensor]:
        narrow = mark((x * 2).to(torch.bfloat16), 1).to(torch.float32)
        kept.copy_(kept + narrow)
        return [narrow, mark((x * 3).to(torch.bfloat16), 0).to(torch.float32), x @ x]

    nodes = fused(traced(backward, (4, 4), (4, 4)))
    positions = {node: place for place, node in enumerate(nodes)}
    first_wait = next(node for node in nodes if node.target is WAIT)
    (product,) = [node for node in nodes if node.target is MM]
    (copied,) = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    assert positions[product] < positions[first_wait] < positions[copied]


def test_the_order_of_nodes_changes_no_bucket() -> None:
    def graph(order: tuple[int, ...]) -> fx.Graph:
        def backward(x: torch.Tensor) -> list[torch.Tensor]:
            harmless = x + len(order)
            found = {index: mark(harmless * index, index) for index in order}
            return [found[index] for index in sorted(found)]

        return traced(backward, (4, 4))

    def reduced(order: tuple[int, ...]) -> list[tuple[object, ...]]:
        nodes = fused(graph(order))
        return [
            tuple(divided.args[0].args[1] for divided in node.args[0])
            for node in nodes
            if node.target is ALL_REDUCE_COALESCED
        ]

    assert reduced((5, 4, 3, 2, 1)) == reduced((1, 5, 2, 4, 3)) == [(5,), (4, 3, 2, 1)]


def test_each_model_agrees_before_its_first_reduction() -> None:
    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        return [mark(x * (n + 1), i, model=m) for n, m in enumerate(("0/0", "0/1")) for i in (0, 1)]

    nodes = fused(traced(backward, (4, 4)))
    found = [(n.target, n.args[2]) for n in nodes if n.target is AGREE]
    assert found == [(AGREE, "0/0"), (AGREE, "0/1")]
    assert kinds(nodes, AGREE, ALL_REDUCE_COALESCED)[0] is AGREE


def test_a_gradient_that_needs_a_mean_is_refused() -> None:
    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        first = mark(x * 2, 1)
        return [first, mark(first * 3, 0)]

    with pytest.raises(InternalError, match="computed from the mean"):
        fuse_marks(traced(backward, (4, 4)))


def test_guarantees_notice_a_lost_reduction_and_a_higher_peak() -> None:
    graph = chain(5)
    before = peak_bytes(graph)
    plans = fuse_marks(graph)
    with pytest.raises(InternalError, match="raised the peak"):
        check_buckets(graph, plans, -(10**6))
    with pytest.raises(InternalError, match="were planned"):
        check_buckets(graph, plans[:1], before)


def test_the_peak_counts_what_lives_at_once() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        y = x + 1  # x and y
        z = y + 1  # x, y and z; then y is gone
        return z + x

    assert peak_bytes(traced(steps, (256,))) == 3 * 1024


def test_getitem_belongs_to_its_wait() -> None:
    nodes = fused(chain(2))
    items = [node for node in nodes if node.target is operator.getitem]
    assert items
    assert all(next(iter(node.users)).target is WAIT for node in items)
