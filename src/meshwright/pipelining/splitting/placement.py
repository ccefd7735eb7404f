"""Decides which stage runs each operator of a traced graph, and which has what it writes in place.

Operators run in the segment between two markers in which they were traced. Those that read neither
the batch nor a parameter (positions, masks, tables of a rotary embedding) run wherever their
results are read, so that constants are not sent. A stage that writes in place to another stage's
output writes to a copy, and later stages read that copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from meshwright.pipelining.splitting.split_points import is_marker
from meshwright.torch_internals.tensors import OpOverload, schema_of
from meshwright.torch_internals.trees import tree_leaves

_REGIONS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")
"""Operators that only run a graph under other settings."""

Roots = frozenset[fx.Node]
"""The nodes whose storage a value may share."""


class Placement:
    """The stages in which the nodes of ``module``'s graph run.

    Raises ``ValueError`` for markers inside a region that is traced as one operator, and for
    in-place writes that cannot be divided among stages.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self.nodes = [node for node in module.graph.nodes if node.op != "output"]
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        """By node, the values that it writes in place."""
        self._roots: dict[fx.Node, Roots] = {}
        for node in self.nodes:
            _refuse_inner_marker(module, node)
            self._roots[node] = self._sharing(node)
            written = tuple(_written(module, node))
            if written:
                self.writes[node] = written
        self._changed = frozenset(
            root for written in self.writes.values() for n in written for root in self._roots[n]
        )
        self.everywhere: set[fx.Node] = set()
        """Nodes that run in every stage that reads them."""
        for node in self.nodes:
            if self._is_constant(node):
                self.everywhere.add(node)
        self.stage: dict[fx.Node, int] = {}
        """By node that runs in one stage, that stage."""
        self.stages = self._number()
        self._changes = self._changes_by_root()
        self._check_changes()

    # ---------------------------------------------------------------------- segments

    def _number(self) -> int:
        """Number the segments that compute something; returns the count."""
        stage, is_filled = 0, False
        for node in self.nodes:
            if is_marker(node):
                stage, is_filled = stage + is_filled, False
            elif node.op == "placeholder":
                self.stage[node] = 0
            elif node in self.everywhere or node.op == "get_attr":
                continue
            elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                if node.args[0] not in self.everywhere:
                    self.stage[node] = self.stage[node.args[0]]
            elif assigns(node) and node.args[1] in self.stage:
                self.stage[node] = self.stage[node.args[1]]
            else:
                self.stage[node] = stage
                is_filled = True
        if not is_filled and stage:
            stage -= 1
        return stage + 1

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node gives the same in any stage, without parameters or the batch."""
        if (
            is_marker(node)
            or node.op == "placeholder"
            or not self._roots[node].isdisjoint(self._changed)
        ):
            return False
        if node.op == "get_attr":
            value = attribute(self._module, node)
            return not isinstance(value, nn.Parameter)
        return _is_pure(self._module, node) and all(
            argument in self.everywhere for argument in node.all_input_nodes
        )

    # ----------------------------------------------------------------------- sharing

    def _sharing(self, node: fx.Node) -> Roots:
        """Derive the roots of a node from those of its arguments."""
        if node.op in ("placeholder", "get_attr"):
            return frozenset((node,))
        if node.target is operator.getitem:
            return self._of(node.all_input_nodes[:1])
        if not isinstance(node.target, OpOverload):
            return self._of(node.all_input_nodes) | {node}
        schema = schema_of(node.target)
        if not any(result.alias_info for result in schema.returns):
            return frozenset((node,))
        return self._of(list(_aliased(node, is_write=False))) or frozenset((node,))

    def _of(self, nodes: Sequence[fx.Node]) -> Roots:
        return frozenset().union(*(self._roots[node] for node in nodes))

    # ----------------------------------------------------------------------- changes

    def _changes_by_root(self) -> dict[fx.Node, list[int]]:
        """List for each root the stages that write it in place."""
        found: dict[fx.Node, list[int]] = {}
        for node, written in self.writes.items():
            for root in self._of(written):
                stages = found.setdefault(root, [])
                if self.stage[node] not in stages:
                    stages.append(self.stage[node])
        return found

    def changed_in(self, value: fx.Node) -> list[int]:
        """List the stages that write ``value``, or a value that shares its storage, in place."""
        return sorted({s for root in self._roots[value] for s in self._changes.get(root, ())})

    def home(self, value: fx.Node, reader: int) -> int:
        """The stage that ``reader`` gets ``value`` from: the last before it that writes it."""
        made = self.stage[value]
        return max([made, *(s for s in self.changed_in(value) if made < s < reader)])

    def uncuttable(self, positions: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
        """List ranges of cuts that in-place writes forbid, before any cut has been made.

        A cut at p is in front of position p; ranges are half open.
        """
        found: list[tuple[int, int]] = []
        for root in self._changes:
            shared = [n for n in self.nodes if root in self._roots[n]]
            readers = [positions[u] for n in shared for u in n.users if u in positions]
            writes = [positions[n] for n, w in self.writes.items() if root in self._of(w)]
            if any(n.op == "get_attr" for n in shared):
                found.append((min(readers) + 1, max(readers) + 1))
                continue
            spans = [
                (positions.get(n, 0), max((positions.get(u, 0) for u in n.users), default=0))
                for n in shared
            ]
            found += [
                (cut, cut + 1)
                for cut in range(1, max(writes) + 1)
                if sum(start < cut <= stop for start, stop in spans) > 1
            ]
        return found

    def _check_changes(self) -> None:
        for node, written in self.writes.items():
            stage = self.stage[node]
            for root in self._of(written):
                shared = [n for n in self.nodes if root in self._roots[n]]
                held = [n for n in shared if n.op == "get_attr"]
                readers = {self.stage[u] for n in held for u in n.users if u in self.stage}
                if held and readers != {stage}:
                    raise ValueError(
                        f"{held[0].target} is changed in place at {source_of(node)}, in stage "
                        f"{stage}, and read in stages {sorted(readers)}: a buffer that changes "
                        "can belong to one stage only; move the split points"
                    )
                before = [n for n in shared if self.stage.get(n, stage) < stage]
                read = [n for n in before if any(self.stage.get(u, 0) >= stage for u in n.users)]
                if len(read) > 1:
                    raise ValueError(
                        f"the operator at {source_of(node)} in stage {stage} changes in place what "
                        f"stage {self.stage[root]} has made and several values share "
                        f"({[n.name for n in read]}): write it out of place, or move the split "
                        "points"
                    )


def source_of(node: fx.Node) -> str:
    """Name the module and line that called the operator of ``node``, if known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack and stack[-1][0] else "the model"
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith("File ")]
    return f"{module} ({node.name}; {lines[-1]})" if lines else f"{module} ({node.name})"


def _is_pure(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node's result depends on its arguments alone, without side effects."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return True
    if isinstance(node.target, OpOverload):
        schema = schema_of(node.target)
        is_random = torch.Tag.nondeterministic_seeded in node.target.tags
        has_result = bool(schema.returns) or schema.name.startswith("aten::_assert")
        return has_result and not is_random and not any(_written(module, node))
    bodies = list(_bodies(module, node))
    return (
        str(node.target) in _REGIONS
        and bool(bodies)
        and all(_is_pure(body, inner) for body in bodies for inner in body.graph.nodes)
    )


def _written(module: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node writes in place."""
    if isinstance(node.target, OpOverload):
        if node.target is not torch.ops.aten.detach_.default:
            yield from _aliased(node, is_write=True)
        return
    for inner in _bodies(module, node):
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        # The region's settings come first, so match the graph's arguments from the end.
        given = dict(zip(reversed(placeholders), reversed(node.args), strict=False))
        for body in inner.graph.nodes:
            for argument in _written(inner, body):
                if argument in given:
                    found = given[argument]
                    if isinstance(found, fx.Node):
                        yield found


def _aliased(node: fx.Node, *, is_write: bool) -> Iterator[fx.Node]:
    """Yield the arguments that an operator's results may alias, or that it writes to."""
    schema = schema_of(node.target)
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None or (is_write and not alias.is_write):
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for found in tree_leaves(value):
            if isinstance(found, fx.Node):
                yield found


def _bodies(module: nn.Module, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graphs that a higher-order operator runs."""
    for argument in node.all_input_nodes if node.op == "call_function" else ():
        if argument.op == "get_attr":
            found = attribute(module, argument)
            if isinstance(found, fx.GraphModule):
                yield found


def assigns(node: fx.Node) -> bool:
    """Whether a node copies an assigned value into a buffer, which export does at the end."""
    target = node.args[0] if node.args else None
    if node.target is not torch.ops.aten.copy_.default or not isinstance(target, fx.Node):
        return False
    # A value that an operator has already written into the buffer is copied onto itself.
    return target.op == "get_attr" or target is node.args[1]


def _refuse_inner_marker(module: nn.Module, node: fx.Node) -> None:
    for body in _bodies(module, node):
        for inner in body.graph.nodes:
            if is_marker(inner):
                raise ValueError(
                    f"a split point lies inside {node.target} at {source_of(node)}: the model "
                    "cannot be cut within a block of autocast, no_grad or checkpointing; put the "
                    "split point outside, or the block inside the stages"
                )
            _refuse_inner_marker(body, inner)


def attribute(module: nn.Module, node: fx.Node) -> Any:  # noqa: ANN401 - whatever it holds
    """Look up the value of a ``get_attr`` node of ``module``: a tensor, a graph, a constant."""
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found
