"""Gathers in graphs: where the pass puts them, what it refuses, planted orders that it finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.errors import InternalError
from support.internals.comm import (
    DRIVE,
    FREE,
    REDUCE,
    SEND,
    START,
    UNSHARD,
    WHOLE,
    UnitForm,
    UnitPart,
)
from support.internals.compiler import check_units, keep_apart, place_units

SIZE = 4


def form(name: str, *around: int) -> UnitForm:
    part = UnitPart(0, 0, (SIZE, SIZE), trains=True)
    return UnitForm(name, around, (("float32", SIZE * SIZE),), (part,), has_backward=True)


def traced(function: Callable[..., object]) -> fx.Graph:
    """The graph of ``function`` on a token and an activation."""
    inputs = torch.zeros(()), torch.zeros(2, SIZE)
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def weight(token: torch.Tensor, number: int, *around: int) -> torch.Tensor:
    (whole,) = UNSHARD(token, "m", number, form(f"unit {number}", *around).text())
    return whole


def chain(token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        x = (x @ weight(token, number)).relu()
    return x


def acts(graph: fx.Graph) -> list[str]:
    """What the graph does with units, with products in between."""
    found: list[str] = []
    for node in graph.nodes:
        if node.target is DRIVE:
            found.append(f"{node.args[4]} {node.args[5]}".removesuffix(" -1"))
        elif node.target is WHOLE:
            found.append(f"wait {node.args[2]}")
        elif node.target is SEND:
            found.append(f"send {node.args[5]}")
        elif node.target is torch.ops.aten.mm.default:
            found.append("mm")
    return found


def forms(count: int) -> dict[int, UnitForm]:
    return {number: form(f"unit {number}") for number in range(count)}


def test_the_next_unit_is_gathered_ahead_and_two_are_whole() -> None:
    graph = traced(chain)
    assert place_units(graph) == 4
    assert acts(graph) == [
        *("begin", "start 0"),
        *("wait 0", "start 1", "mm", "free 0"),
        *("wait 1", "start 2", "mm", "free 1"),
        *("wait 2", "start 3", "mm", "free 2"),
        *("wait 3", "mm", "free 3"),
        "hold",
    ]
    assert not graph.find_nodes(op="call_function", target=UNSHARD)
    begin = next(node for node in graph.nodes if node.target is DRIVE)
    assert str(begin.args[6]).startswith("unit 0 to unit 3; ")
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta, node


def test_a_unit_around_others_is_held_beside_two() -> None:
    def nested(token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        outer = weight(token, 0)
        x = x @ outer
        for number in (1, 2):
            x = x @ weight(token, number, 0)
        return x @ outer

    graph = traced(nested)
    place_units(graph)
    assert acts(graph) == [
        *("begin", "start 0", "wait 0", "start 1", "mm"),
        *("wait 1", "start 2", "mm", "free 1"),
        *("wait 2", "mm", "free 2"),
        *("mm", "free 0", "hold"),
    ]


def test_units_that_are_read_at_a_time_wait_for_room() -> None:
    def both(token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first, second, third = (weight(token, number) for number in range(3))
        return ((x @ first) @ second) @ (first @ third)

    graph = traced(both)
    place_units(graph)
    assert acts(graph) == [
        *("begin", "start 0", "wait 0", "start 1", "mm", "wait 1", "mm", "free 1", "start 2"),
        *("wait 2", "mm", "free 0", "free 2", "mm", "hold"),
    ]


def test_three_units_that_are_read_at_a_time_are_refused() -> None:
    def all_three(token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wholes = [weight(token, number) for number in range(3)]
        for whole in (*wholes, *wholes):
            x = x @ whole
        return x

    with pytest.raises(InternalError, match=r"holds 3 units of m whole at a time, \['unit 0', "):
        place_units(traced(all_three))


def backwards() -> fx.Graph:
    """The backward of two units, whose weights' gradients come before those of their inputs."""

    def backward(token: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
        zeros = []
        for number in (1, 0):
            gradient = tangents.t() @ tangents
            zeros.append(REDUCE(token, [gradient], [0], "m", number))
            tangents = tangents @ weight(token, number)
        return zeros[0] + zeros[1]

    graph = traced(backward)
    for node in graph.find_nodes(op="placeholder"):
        node.target = {"token_1": "token_1", "tangents_1": "tangents_1"}[node.target]
    graph.eliminate_dead_code()  # the activation's gradient is nobody's
    place_units(graph)
    return graph


def test_gradients_are_sent_behind_their_unit_and_live_until_the_next_are() -> None:
    graph = backwards()
    assert not graph.find_nodes(op="call_function", target=REDUCE)
    assert acts(graph) == [
        *("begin backward", "start backward 1"),
        *("mm", "wait 1", "mm", "free backward 1", "send 1"),
        *("mm", "send 0", "hold"),
    ]
    first, second = graph.find_nodes(op="call_function", target=SEND)
    assert second.args[3] == first.args[1]
    assert not first.args[3]


def test_a_whole_backward_in_one_graph_is_refused() -> None:
    def both(token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return REDUCE(token, [x.t() @ x], [0], "m", 0)

    with pytest.raises(RuntimeError, match="call backward outside of compiled_autograd"):
        place_units(traced(both))


def test_what_is_computed_of_wholes_alone_is_not_kept() -> None:
    def mixed(token: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = weight(token, 0).t().to(torch.bfloat16)
        noisy = torch.bernoulli(weight(token, 1))
        return x @ narrow.float() @ noisy, weight(token, 2).t()

    graph = traced(mixed)
    keep_apart(graph)
    always = CheckpointPolicy.MUST_RECOMPUTE
    others = {str(n.target) for n in graph.nodes if n.meta.get("recompute") is not always}
    assert {each for each in others if each.startswith("aten")} == {
        "aten.mm.default",
        "aten.bernoulli.default",
        "aten.clone.default",
    }
    *_, output = graph.nodes
    _, copied = output.args[0]
    assert copied.target is torch.ops.aten.clone.default
    place_units(graph)


def test_what_one_unit_hands_on_to_the_next_is_not_computed_anew() -> None:
    graph = traced(chain)
    keep_apart(graph)
    kept = [n for n in graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert [n.target for n in kept] == [torch.ops.aten.relu.default] * 3


def placed() -> fx.Graph:
    graph = traced(chain)
    place_units(graph)
    return graph


def find(graph: fx.Graph, what: object, number: int) -> fx.Node:
    for node in graph.nodes:
        if node.target is DRIVE and node.args[4:6] == (what, number):
            return node
        if node.target is what and node.args[2] == number:
            return node
    raise AssertionError(f"no {what} {number}")


def test_a_gather_too_early_is_found() -> None:
    graph = placed()
    find(graph, START, 1).append(find(graph, START, 2))
    with pytest.raises(InternalError, match=r"3 units of m whole at a time, \['unit 0', 'unit 1'"):
        check_units(graph, "m", forms(4))


def test_an_end_too_late_is_found() -> None:
    graph = placed()
    find(graph, FREE, 1).append(find(graph, FREE, 0))
    with pytest.raises(InternalError, match="3 units of m whole"):
        check_units(graph, "m", forms(4))


def test_an_end_too_early_is_found() -> None:
    graph = placed()
    free = find(graph, FREE, 1)
    free.args = (*free.args[:2], [], *free.args[3:])
    find(graph, WHOLE, 1).append(free)
    with pytest.raises(InternalError, match="unit 1' in .*where it is not whole"):
        check_units(graph, "m", forms(4))


def test_a_gather_left_out_or_made_twice_is_found() -> None:
    graph = placed()
    graph.erase_node(find(graph, FREE, 3))
    with pytest.raises(InternalError, match=r"has free of \[0, 1, 2\], not of \[0, 1, 2, 3\]"):
        check_units(graph, "m", forms(4))
    graph = placed()
    again = find(graph, START, 0)
    with graph.inserting_after(again):
        graph.call_function(again.target, again.args).meta["val"] = None
    with pytest.raises(InternalError, match=r"has start of \[0, 0, 1, 2, 3\]"):
        check_units(graph, "m", forms(4))


def test_gradients_that_are_sent_too_early_are_found() -> None:
    graph = backwards()
    find(graph, WHOLE, 1).append(graph.find_nodes(op="call_function", target=SEND)[0])
    with pytest.raises(InternalError, match="sends gradients of unit 'unit 1'.* before it is"):
        check_units(graph, "m", {1: form("unit 1")})


def test_a_whole_parameter_that_is_kept_is_found() -> None:
    graph = placed()
    *_, output = graph.nodes
    kept = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)[2]
    output.args = ((output.args[0], kept),)
    with pytest.raises(InternalError, match="unit 'unit 2' in an output"):
        check_units(graph, "m", forms(4))
