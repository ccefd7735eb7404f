"""The cost of a traced model's operators: parameters, operations, time, memory, and traffic."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.pipelining.splitting.placement import Placement, assigns, attribute
from meshwright.torch_internals.trees import tree_flatten, tree_map_only, tree_unflatten

_ROUNDS = 3
_COPIES = 4
"""Copies of a parameter in training: value, gradient, two optimizer states."""


@dataclass(slots=True)
class Costs:
    """The cost of each operator that a cut can precede, including nodes that belong to it."""

    each: list[float]
    shared: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By operator, (number, cost) of parameters that several use; each counts once in a stage."""
    unit: str = ""
    saved: list[float] = field(default_factory=list)
    """Bytes that each operator keeps for its backward, where that was measured."""

    def total(self) -> float:
        """Sum all operators, as if they were one stage."""
        return self.of(0, len(self.each))

    def of(self, start: int, stop: int) -> float:
        """Sum the operators of one stage."""
        once = {n: cost for at in range(start, stop) for n, cost in self.shared.get(at, ())}
        return sum(self.each[start:stop]) + sum(once.values())


# ------------------------------------------------------------------------------- positions


def cuttable(place: Placement) -> list[fx.Node]:
    """List the operators that run in exactly one stage, in order; a cut may precede each."""
    return [
        node
        for node in place.nodes
        if node in place.stage
        and node.op != "placeholder"
        and node.target is not operator.getitem
        and not (assigns(node) and node.args[1] in place.stage)
    ]


def _positions(nodes: Sequence[fx.Node], every: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Map each node of the graph to the operator that it belongs to."""
    found = {node: position for position, node in enumerate(nodes)}
    for node in every:
        source = node.args[0] if node.target is operator.getitem else None
        if assigns(node):
            source = node.args[1]
        if isinstance(source, fx.Node) and source in found:
            found[node] = found[source]
    return found


def traffic(place: Placement, nodes: Sequence[fx.Node]) -> list[float]:
    """List for each position the bytes of values made before it and read at or after it.

    Infinite where an in-place write forbids a cut.
    """
    found = _positions(nodes, place.nodes)
    steps = [0.0] * (len(nodes) + 1)
    for node in place.nodes:
        made = found.get(node, 0 if node.op == "placeholder" else None)
        last = max((found[user] for user in node.users if user in found), default=-1)
        value = node.meta.get("val")
        if made is not None and last > made and not isinstance(value, Sequence):
            steps[made + 1] += _bytes(value)
            steps[last + 1] -= _bytes(value)
    total = 0.0
    sent: list[float] = []
    for step in steps[: len(nodes)]:
        total += step
        sent.append(total)
    for start, stop in place.uncuttable(found):
        sent[start:stop] = [float("inf")] * (stop - start)
    return sent


def _bytes(value: object) -> float:
    if not isinstance(value, torch.Tensor):
        return 8.0
    return float(_size(value) * value.dtype.itemsize)


def _size(value: torch.Tensor) -> int:
    size = 1
    for extent in value.shape:
        size *= _hint(extent)
    return size


def _hint(extent: Any) -> int:  # noqa: ANN401
    """The size; for a dynamic one, its value in the trace."""
    return int(extent) if isinstance(extent, int) else int(extent.node.hint)


# ------------------------------------------------------------------------------ parameters


def parameters(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Costs:
    """Count the parameters that each operator uses alone, and those that several share."""
    return _weighed(module, nodes, lambda parameter: float(parameter.numel()), "parameters")


def _weighed(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    weight: Callable[[nn.Parameter], float],
    unit: str,
) -> Costs:
    users: dict[int, tuple[float, list[int]]] = {}
    for position, node in enumerate(nodes):
        for argument in node.all_input_nodes:
            held = _held(module, argument)
            if held is not None:
                _, where = users.setdefault(id(held), (weight(held), []))
                where.append(position)
    costs = Costs([0.0] * len(nodes), {}, unit)
    for number, (size, where) in enumerate(users.values()):
        if len(where) == 1:
            costs.each[where[0]] += size
            continue
        for position in dict.fromkeys(where):
            costs.shared.setdefault(position, []).append((number, size))
    return costs


def _held(module: nn.Module, node: fx.Node) -> nn.Parameter | None:
    if node.op != "get_attr":
        return None
    found = attribute(module, node)
    return found if isinstance(found, nn.Parameter) else None


# ------------------------------------------------------------------------------ operations


def flops(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Costs:
    """Count the floating point operations of matrix products and convolutions in a forward."""
    found: dict[fx.Node, float] = {}
    for node in module.graph.nodes:
        modes = {
            id(mode): mode
            for argument in node.all_input_nodes
            if (mode := getattr(argument.meta.get("val"), "fake_mode", None)) is not None
        }
        if node.op == "call_function" and callable(node.target) and modes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _traced(module, n))
            counter = FlopCounterMode(display=False)
            with next(iter(modes.values())), torch.no_grad(), counter:
                node.target(*args, **kwargs)
            found[node] = float(counter.get_total_flops())
    return Costs(_by_position(nodes, module, found), {}, "operations")


def _traced(module: nn.Module, node: fx.Node) -> Any:  # noqa: ANN401
    """The value of a node in the trace: a fake tensor, or the graph of a region."""
    if "val" in node.meta:
        return node.meta["val"]
    return attribute(module, node) if node.op == "get_attr" else None


def _by_position(
    nodes: Sequence[fx.Node], module: fx.GraphModule, found: Mapping[fx.Node, float]
) -> list[float]:
    """Sum costs by operator; nodes that run in every reading stage do not count."""
    each = [0.0] * len(nodes)
    for node, position in _positions(nodes, list(module.graph.nodes)).items():
        each[position] += found.get(node, 0.0)
    return each


# -------------------------------------------------------------------------------- measured


def measured(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Costs:
    """Measure the seconds of each operator's forward and backward, and the bytes it saves."""
    runner = _Timed(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    held = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        given = [_example(node.meta.get("val"), device) for node in placeholders]
        for _ in range(_ROUNDS):
            runner.run(*given)
    for buffer, value in held:
        buffer.copy_(value)
    seconds, saved = (
        _by_position(nodes, module, found) for found in (runner.seconds, runner.saved)
    )
    return Costs(seconds, {}, "seconds", saved)


def memory(costs: Costs, module: fx.GraphModule, nodes: Sequence[fx.Node], flying: int) -> Costs:
    """Count the bytes of each operator's parameters in training and of ``flying`` microbatches."""

    def weight(parameter: nn.Parameter) -> float:
        return float(_COPIES * parameter.numel() * parameter.element_size())

    found = _weighed(module, nodes, weight, "bytes")
    each = [a + flying * b for a, b in zip(found.each, costs.saved, strict=True)]
    return replace(found, each=each)


def _example(value: object, device: torch.device) -> object:
    """Make a value like a traced argument: random floats, zeros for integers (valid indices)."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_hint(size) for size in value.shape]
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.randn(shape, dtype=value.dtype, device=device)
    fill = torch.ones if value.dtype is torch.bool else torch.zeros
    return fill(shape, dtype=value.dtype, device=device)


class _Timed(fx.Interpreter):
    """Runs a graph operator by operator, each forward and backward alone; keeps the least times."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seconds: dict[fx.Node, float] = {}
        self.saved: dict[fx.Node, float] = {}
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._writes = frozenset(Placement(module).writes)
        self._needs: set[fx.Node] = set()
        """Nodes whose values need gradients."""

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        """Run one operator on detached inputs, so that its backward can run alone."""
        if n.op != "call_function" or n.target is operator.getitem:
            result = super().run_node(n)
            if any(a in self._needs for a in n.all_input_nodes) or isinstance(result, nn.Parameter):
                self._needs.add(n)
            return result
        needs = [a for a in n.all_input_nodes if a in self._needs]
        leaves = {a: _leaf(self.env[a], is_written=n in self._writes) for a in needs}
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: leaves.get(a, self.env[a]))
        size = 0.0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen and n not in self.saved:
                self._seen.add(storage.data_ptr())
                size += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            start = time.perf_counter()
            result = self.call_function(n.target, args, kwargs)
            _wait(result)
            spent = time.perf_counter() - start
        flat, spec = tree_flatten(result)
        outputs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs:
            self._needs.add(n)
            spent += _backward(outputs, leaves.values())
        self.seconds[n] = min(spent, self.seconds.get(n, spent))
        self.saved.setdefault(n, size)
        return tree_unflatten([_detached(leaf) for leaf in flat], spec)


def _leaf(value: Any, *, is_written: bool) -> Any:  # noqa: ANN401
    """Detach ``value`` as an input that needs gradients; a copy where it is written in place."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        found = tensor.detach().requires_grad_()
        return found * 1 if is_written else found

    return tree_map_only(torch.Tensor, leaf, value)


def _backward(outputs: Sequence[torch.Tensor], leaves: Any) -> float:  # noqa: ANN401
    """Run the backward of one operator; returns its seconds."""
    every = [leaf for value in leaves for leaf in tree_flatten(value)[0]]
    inputs = [leaf for leaf in every if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(output) for output in outputs]
    start = time.perf_counter()
    found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    _wait(found)
    return time.perf_counter() - start


def _detached(value: Any) -> Any:  # noqa: ANN401
    return value.detach() if isinstance(value, torch.Tensor) else value


def _wait(result: object) -> None:
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
            torch.cuda.synchronize(leaf.device)
            return
