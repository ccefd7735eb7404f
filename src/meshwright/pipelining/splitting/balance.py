"""Split policies: where to split a traced model so that its largest stage is as small as possible.

Operators keep the order of the trace, so a split is a list of cut positions. A bisection finds the
least bound on the cost of a stage for which a split exists. Among all splits whose largest stage is
within 5 % of that bound, the one that sends the fewest bytes between stages is taken. A cost counts
parameters, operations, seconds or bytes of memory.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright import comm
from meshwright.errors import CommunicationError
from meshwright.pipelining.signature import detached
from meshwright.pipelining.splitting.placement import Placement, assigns, attribute
from meshwright.pipelining.splitting.split_points import SplitPolicy, put_marker
from meshwright.torch_internals.trees import tree_flatten, tree_map_only, tree_unflatten

SLACK = 1.05
"""Bound on the largest stage, as a multiple of the least possible, to save traffic."""
_PRECISION = 1e-4
_ROUNDS = 3
_COPIES = 4
"""Copies of a parameter in training: value, gradient, two optimizer states."""


@dataclass(slots=True)
class OperatorCosts:
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
    if isinstance(extent, int):
        return extent
    return int(extent.node.hint or 1)  # none where it depends on values, as rows of an expert


# ------------------------------------------------------------------------------ parameters


def parameters(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> OperatorCosts:
    """Count the parameters that each operator uses alone, and those that several share."""
    return _weighed(module, nodes, lambda parameter: float(parameter.numel()), "parameters")


def _weighed(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    weight: Callable[[nn.Parameter], float],
    unit: str,
) -> OperatorCosts:
    users: dict[int, tuple[float, list[int]]] = {}
    for position, node in enumerate(nodes):
        for argument in node.all_input_nodes:
            held = _held(module, argument)
            if held is not None:
                _, where = users.setdefault(id(held), (weight(held), []))
                where.append(position)
    costs = OperatorCosts([0.0] * len(nodes), {}, unit)
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


def flops(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> OperatorCosts:
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
    return OperatorCosts(_by_position(nodes, module, found), {}, "operations")


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


def measured(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> OperatorCosts:
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
    return OperatorCosts(seconds, {}, "seconds", saved)


def memory(
    costs: OperatorCosts, module: fx.GraphModule, nodes: Sequence[fx.Node], flying: int
) -> OperatorCosts:
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
        return tree_unflatten([detached(leaf) for leaf in flat], spec)


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


def _wait(result: object) -> None:
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
            torch.cuda.synchronize(leaf.device)
            return


# ------------------------------------------------------------------------------------ cuts


_MEASURES: Mapping[str, Callable[[fx.GraphModule, Sequence[fx.Node]], OperatorCosts]] = (
    MappingProxyType(
        {"parameters": parameters, "flops": flops, "time": measured, "memory": measured}
    )
)


@dataclass(slots=True)
class _CostWindow:
    """The cost of the operators from one position to another, kept while both move."""

    costs: Sequence[float]
    shared: Mapping[int, Sequence[tuple[int, float]]]
    """By position, (number, cost) of parameters that count once however often they are used."""
    total: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, position: int) -> None:
        """Add a position at the end."""
        self.total += self.costs[position]
        for number, cost in self.shared.get(position, ()):
            before = self.counts.get(number, 0)
            self.counts[number] = before + 1
            self.total += 0.0 if before else cost

    def remove(self, position: int) -> None:
        """Remove a position at the start."""
        self.total -= self.costs[position]
        for number, cost in self.shared.get(position, ()):
            self.counts[number] -= 1
            self.total -= 0.0 if self.counts[number] else cost


def best_cuts(
    costs: OperatorCosts,
    stages: int,
    sent: Sequence[float],
    limit: OperatorCosts | None = None,
    bound: float = 0.0,
) -> list[int]:
    """List the positions at which ``stages`` stages begin, the first of them left out.

    ``sent[p]`` is the traffic of a cut in front of position ``p``, infinite where none is allowed.
    With ``limit`` no stage may exceed ``bound`` of that cost. Raises ``ValueError`` where no split
    exists.
    """
    both = [costs] if limit is None else [costs, limit]
    count = len(costs.each)
    low, high = 0.0, costs.total()

    def bounds(cap: float) -> list[float]:
        return [cap] if limit is None else [cap, bound]

    if _chosen(both, bounds(high), stages, sent) is None:
        raise ValueError(
            f"cannot split {count} operators into {stages} stages"
            + (f" of at most {bound:g} {limit.unit} each" if limit is not None else "")
            + ": use fewer stages"
            + ("" if limit is None else " or a larger limit")
        )
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _chosen(both, bounds(middle), stages, sent) is None:
            low = middle
        else:
            high = middle
    return _chosen(both, bounds(high * SLACK / (1 + _PRECISION)), stages, sent) or []


def _chosen(
    costs: Sequence[OperatorCosts], bounds: Sequence[float], stages: int, sent: Sequence[float]
) -> list[int] | None:
    """Find the cuts of least traffic with all stages within the bounds, if there are any."""
    starts = _first_starts(costs, bounds)
    count = len(starts)
    before = [0.0, *[math.inf] * count]
    origins: list[list[int]] = []
    for stage in range(stages):
        after, origin = [math.inf] * (count + 1), [0] * (count + 1)
        window: deque[int] = deque()
        for end in range(1, count + 1):
            begin = end - 1
            if before[begin] < math.inf:
                while window and before[window[-1]] > before[begin]:
                    window.pop()
                window.append(begin)
            while window and window[0] < starts[end - 1]:
                window.popleft()
            is_cut = end < count
            if window and (is_cut or stage == stages - 1):
                after[end] = before[window[0]] + (sent[end] if is_cut else 0.0)
                origin[end] = window[0]
        origins.append(origin)
        before = after
    if before[count] == math.inf:
        return None
    cuts: list[int] = []
    end = count
    for origin in reversed(origins):
        end = origin[end]
        cuts.append(end)
    return cuts[-2::-1]


def _first_starts(costs: Sequence[OperatorCosts], bounds: Sequence[float]) -> list[int]:
    """For each last position of a stage, the first position at which it may start."""
    count = len(costs[0].each)
    found = [0] * count
    for cost, bound in zip(costs, bounds, strict=True):
        window, start = _CostWindow(cost.each, cost.shared), 0
        for end in range(count):
            window.add(end)
            while start <= end and window.total > bound * (1 + 1e-12):
                window.remove(start)
                start += 1
            found[end] = max(found[end], start)
    return found


def balanced(
    stages: int,
    by: str = "parameters",
    *,
    memory_limit: float | None = None,
    in_flight: int = 1,
) -> SplitPolicy:
    """Make a split policy for `pipeline` that keeps the largest of ``stages`` stages small.

    ``by`` is ``"parameters"`` (their number), ``"flops"`` (of matrix products and convolutions in a
    forward), ``"time"`` (of each operator's forward and backward, run alone on random inputs with
    the model's parameters) or ``"memory"`` (bytes, see below). What several operators of a stage
    share counts once in it, and again in every other stage that uses it.

    ``memory_limit`` bounds the bytes of each stage: four times its parameters (values, gradients
    and two states of an optimizer) and what ``in_flight`` microbatches keep for their backward.

    All ranks use the measurements of the first, so with ``"time"``, ``"memory"`` or a memory limit
    every rank of the job must call `pipeline`. Buffers and random generators are restored.

    Raises ``ValueError`` for another measure, and when the model cannot be split that way.
    """
    if by not in _MEASURES:
        raise ValueError(f"expected by to be one of {list(_MEASURES)}, found {by!r}")

    def policy(module: fx.GraphModule) -> fx.GraphModule:
        place = Placement(module)
        nodes = cuttable(place)
        if len(nodes) < stages:
            raise ValueError(f"cannot split {len(nodes)} operators into {stages} stages")
        cost = _agreed(by, module, nodes)
        limit = None
        if by == "memory" or memory_limit is not None:
            timed = cost if cost.saved else _agreed("memory", module, nodes)
            size = memory(timed, module, nodes, in_flight)
            cost = size if by == "memory" else cost
            limit = size if memory_limit is not None else None
        cuts = best_cuts(cost, stages, traffic(place, nodes), limit, memory_limit or 0.0)
        for position in cuts:
            put_marker(module.graph, nodes[position])
        module.recompile()
        edges = [0, *cuts, len(nodes)]
        module.meta["balance"] = [cost.of(a, b) for a, b in itertools.pairwise(edges)]
        return module

    return policy


def _agreed(by: str, module: fx.GraphModule, nodes: Sequence[fx.Node]) -> OperatorCosts:
    """Return the costs of operators; measured ones are the first rank's, on all ranks."""
    costs = _MEASURES[by](module, nodes)
    if by in ("parameters", "flops"):
        return costs
    try:
        communicator = comm.communicator()
    except CommunicationError:  # One process.
        return costs
    mine = [costs.each, costs.saved]
    each, saved = communicator.gather_values(mine, label="costs of operators")[0]
    return replace(costs, each=each, saved=saved)
