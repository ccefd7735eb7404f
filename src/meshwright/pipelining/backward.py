"""The backward pass of one stage and microbatch: full, or its input half and its weight half.

The input half runs autograd towards the inputs only, and keeps the gradients that arrive at nodes
where parameters join the path. The weight half computes from them the gradients of the parameters'
branches, and runs autograd on these so that each parameter's gradient is accumulated once: hooks on
parameters fire once, and in this half only.

::

    loss <- matmul <- norm <- matmul <- input        the path: input half
              |        |        |
            weight   scale    weight                 the branches: weight half
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from meshwright.comm.dtensors.local_leaves import is_summed_at_end
from meshwright.torch_internals.autograd import (
    ACTIVATIONS,
    held_nodes_live,
    input_metadata_of,
    may_be_packed,
    run_engine,
    saved,
)

_SOON = 1 << 18
"""Bytes of collected gradients at which they are passed to autograd."""
Node = Any  # torch has no public type with the attributes of a node
Gradients = Sequence[torch.Tensor | None]
Found = Sequence[torch.Tensor | None] | None
Hook = Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
"""A hook of a node's ``register_hook``: takes grad_inputs and grad_outputs."""
DwRunner = Callable[[], object]
"""The user's function that computes the gradients of weights."""
DwBuilder = Callable[[], DwRunner]


@dataclass(slots=True)
class Junction:
    """A node on the path that has branches to parameters, or the start of a branch of its own."""

    node: Node
    edges: tuple[int, ...]
    """Indices of its next functions that are branches."""
    gradients: tuple[torch.Tensor | None, ...] = ()
    """The gradients that arrived at the node in the input half; empty until then."""
    hooks: tuple[Hook, ...] = ()
    """The user's hooks on the node, which run in both halves."""
    roots: Sequence[GradientEdge] = ()
    """Edges from outputs that keep the node alive, where a reference to it does not."""

    def keep(self, _: object, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Hook of the node: stores the gradients that arrived, as pre-hooks have changed them."""
        self.gradients = gradients

    def others(self) -> list[int]:
        """List the edges that are not branches."""
        following = enumerate(self.node.next_functions)
        return [at for at, (node, _) in following if node is not None and at not in self.edges]

    def listen(self) -> RemovableHandle:
        """Register `keep` on the node, and record the user's hooks there; returns the handle."""
        handle = self.node.register_hook(self.keep)
        hooks = handle.hooks_dict_ref()
        if len(hooks) > 1:
            self.hooks = tuple(hook for number, hook in hooks.items() if number != handle.id)
        return handle


def stage_backward(
    stage_output: object,
    output_grads: object,
    input_values: Iterable[object],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Run the full backward of a stage.

    ``stage_output`` and ``output_grads`` are matching nested sequences and mappings; an output
    whose gradient is None is left out. A scalar loss needs no ``output_grads``.
    ``outputs_with_grads_idxs`` is ignored. Returns the gradients of ``input_values``, None for
    those without one, and clears their ``.grad``.
    """
    tensors, gradients = _starts(stage_output, output_grads)
    if tensors:
        torch.autograd.backward(tensors, gradients)
    found: list[torch.Tensor | None] = []
    for value in input_values:
        if isinstance(value, torch.Tensor) and (value.is_leaf or value.retains_grad):
            found.append(value.grad)
            value.grad = None
        else:
            found.append(None)
    return tuple(found)


def run_backward(
    outputs: Sequence[object], gradients: Sequence[torch.Tensor | None] | None
) -> None:
    """Run the full backward of flat ``outputs``, as `stage_backward` does for nested ones.

    If every gradient has the shape of its output, the engine is called directly, without the
    checks of `torch.autograd.backward`.
    """
    if gradients is not None:
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is None or not isinstance(output, torch.Tensor) or not output.requires_grad:
                continue
            if gradient.shape != output.shape:
                break
            roots.append(output)
            seeds.append(gradient)
        else:
            if roots:
                run_engine(
                    tuple(roots),
                    tuple(seeds),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            return
    stage_backward(outputs, gradients, ())


def stage_backward_input(
    stage_outputs_or_loss: object,
    output_grads: object,
    input_values: Sequence[object],
    weights: Iterable[torch.Tensor] | None,
) -> tuple[tuple[torch.Tensor | None, ...], list[Junction]]:
    """Run the input half of a stage's backward.

    ``weights`` are the parameters whose gradients are left for the other half; None for all leaves
    of the graph but the inputs.

    Returns the gradients of ``input_values`` (also added to their ``.grad``), None for those
    without one, and the junctions for `stage_backward_weight`. No gradient of ``weights`` is
    computed, and the junctions keep the graph of the forward alive.
    """
    tensors, gradients = _starts(stage_outputs_or_loss, output_grads)
    inputs = [v for v in input_values if isinstance(v, torch.Tensor) and v.requires_grad]
    wanted = None if weights is None else [v for v in weights if v.requires_grad]
    graph = _Graph(wanted, inputs)
    # An input or parameter returned unchanged has no `grad_fn`, but a gradient edge.
    roots = [*map(get_gradient_edge, tensors)]
    nodes = [root.node for root in roots]
    junctions = graph.junctions(nodes)
    if not held_nodes_live():
        junctions = [replace(junction, roots=roots) for junction in junctions]
    on_path: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for tensor, gradient, node in zip(tensors, gradients, nodes, strict=True):
        if graph.leads_to(node) & graph.INPUT:
            on_path.append((tensor, gradient))
        elif graph.leads_to(node) & graph.WEIGHT:
            junctions.append(_root(tensor, gradient))
    found: dict[int, torch.Tensor | None] = {}
    if on_path and inputs:
        found = _run_path(on_path, inputs, junctions)
    results: list[torch.Tensor | None] = []
    for value in input_values:
        gradient = found.get(id(value))
        results.append(gradient)
        if isinstance(value, torch.Tensor) and gradient is not None:
            value.grad = gradient if value.grad is None else value.grad + gradient
    return tuple(results), junctions


def stage_backward_weight(
    weights: Iterable[torch.Tensor], param_groups: list[Junction], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Run the weight half on ``param_groups``, the junctions of `stage_backward_input`.

    Gradients are accumulated as by a full backward. Returns the ``.grad`` of ``weights``. Unless
    ``retain_graph``, ``param_groups`` is emptied, which frees the memory of the forward.
    """
    sums = _Sums(param_groups, retain_graph=retain_graph)

    def collect() -> None:
        for junction in param_groups:
            for edge, gradient in _branches(junction):
                if gradient is not None:
                    sums.add(edge, gradient)
            if not retain_graph:
                junction.gradients = ()

    with torch.no_grad():
        if any(junction.edges and reads_hooked(junction.node) for junction in param_groups):
            _inside_backward(collect)
        else:
            collect()
    sums.finish()
    if not retain_graph:
        param_groups.clear()
    return tuple(weight.grad for weight in weights)


# ------------------------------------------------------------------------------ private


def _starts(
    outputs: object, gradients: object
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """List the outputs from which a backward starts, with their gradients (None for a scalar)."""
    tensors: list[torch.Tensor] = []
    found: list[torch.Tensor | None] = []
    for output, gradient in _pairs(outputs, gradients):
        if not output.requires_grad or (gradient is None and gradients is not None):
            continue
        tensors.append(output)
        found.append(gradient)
    return tensors, found


def _pairs(
    outputs: object, gradients: object
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield the tensors among nested ``outputs``, each with its gradient."""
    if isinstance(outputs, torch.Tensor):
        # torch's stages give the gradient of a single output as a tuple of one.
        if isinstance(gradients, Sequence) and len(gradients) == 1:
            gradients = gradients[0]
        if gradients is not None and not isinstance(gradients, torch.Tensor):
            raise TypeError(
                f"expected a tensor or None as the gradient of an output of shape "
                f"{tuple(outputs.shape)}, found {type(gradients).__name__}"
            )
        yield outputs, gradients
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str | bytes):
        if gradients is None:
            given: Sequence[object] = [None] * len(outputs)
        elif isinstance(gradients, Sequence) and len(gradients) == len(outputs):
            given = gradients
        else:
            size = len(gradients) if isinstance(gradients, Sequence) else 1
            raise ValueError(f"expected a gradient for each of {len(outputs)} outputs, got {size}")
        for output, gradient in zip(outputs, given, strict=True):
            yield from _pairs(output, gradient)
    elif isinstance(outputs, Mapping):
        given_by = gradients if isinstance(gradients, Mapping) else {}
        for name, output in outputs.items():
            yield from _pairs(output, given_by.get(name))


@dataclass(slots=True)
class _Graph:
    """The inputs and weights that each node of a backward graph leads to."""

    weights: Sequence[torch.Tensor] | None
    """Those whose gradients come later; None for all leaves that are not inputs."""
    inputs: Sequence[torch.Tensor]
    _reach: dict[Node, int] = field(default_factory=dict)

    INPUT, WEIGHT = 1, 2

    def junctions(self, roots: Iterable[Node]) -> list[Junction]:
        """Search the graph behind ``roots`` for nodes on the path with branches to weights."""
        for tensors, flag in ((self.weights or (), self.WEIGHT), (self.inputs, self.INPUT)):
            for tensor in tensors:
                self._reach[get_gradient_edge(tensor).node] = flag
        found: list[Junction] = []
        for root in roots:
            self._search(root, found)
        return found

    def leads_to(self, node: Node) -> int:
        """Return what ``node`` leads to: `INPUT`, `WEIGHT`, their sum, or 0."""
        return self._reach.get(node, 0)

    def _search(self, root: Node, found: list[Junction]) -> None:
        reach = self._reach
        # Not recursive: graphs are deeper than Python's limit. `next_functions` is kept with the
        # node, because each read of it makes a new tuple.
        stack: list[tuple[Node, tuple[tuple[Node, int], ...], int]] = []
        if root not in reach:
            reach[root] = 0
            stack.append((root, root.next_functions, 0))
        while stack:
            node, edges, at = stack.pop()
            while at < len(edges):
                following = edges[at][0]
                at += 1
                if following is not None and following not in reach:
                    reach[following] = 0
                    stack.append((node, edges, at))
                    stack.append((following, following.next_functions, 0))
                    break
            else:
                self._close(node, edges, found)

    def _close(
        self, node: Node, edges: tuple[tuple[Node, int], ...], found: list[Junction]
    ) -> None:
        """Set the flags of ``node`` from its next functions, which are all done."""
        reach = self._reach
        flags = 0
        if not edges and self.weights is None and hasattr(node, "variable"):
            flags = self.WEIGHT
        for following, _ in edges:
            if following is not None:
                flags |= reach[following]
        reach[node] |= flags
        if flags == self.INPUT | self.WEIGHT:
            branches = tuple(
                number
                for number, (following, _) in enumerate(edges)
                if following is not None and reach[following] == self.WEIGHT
            )
            if branches:
                found.append(Junction(node, branches))


def _root(tensor: torch.Tensor, gradient: torch.Tensor | None) -> Junction:
    """Make the junction of an output that depends on parameters alone."""
    start = torch.ones_like(tensor) if gradient is None else gradient
    # An edge stands for the node: the branch begins at the output itself, and the edge keeps it
    # alive.
    return Junction(get_gradient_edge(tensor), (), (start,))


def _run_path(
    starts: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    junctions: Iterable[Junction],
) -> dict[int, torch.Tensor | None]:
    """Run autograd to ``inputs``; returns the gradients by the ``id`` of the input."""
    handles = []
    needs: list[tuple[Node, tuple[bool, ...]]] = []
    for junction in junctions:
        if not junction.edges:
            continue
        handles.append(junction.listen())
        if isinstance(junction.node, torch.autograd.function.BackwardCFunction):
            # Restored below: the weight half runs the same node for its other edges.
            needs.append((junction.node, junction.node.needs_input_grad))
            set_needs(junction.node, junction.others())
    try:
        found = torch.autograd.grad(
            [tensor for tensor, _ in starts],
            inputs,
            [gradient for _, gradient in starts],
            retain_graph=True,  # the weight half reads the saved tensors
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
        for node, before in needs:
            node.needs_input_grad = before
    return {id(tensor): gradient for tensor, gradient in zip(inputs, found, strict=True)}


def _branches(junction: Junction) -> Iterator[tuple[GradientEdge, torch.Tensor | None]]:
    """Yield the edges where branches of ``junction`` begin, each with the gradient it receives."""
    if not junction.edges:
        yield junction.node, junction.gradients[0]
        return
    if all(gradient is None for gradient in junction.gradients):
        return
    node = junction.node
    found = weight_gradients(node, junction.gradients, junction.edges, junction.hooks)
    for edge, gradient in zip(junction.edges, found, strict=True):
        yield GradientEdge(*node.next_functions[edge]), gradient


class _Sums:
    """Passes gradients of branches to autograd: small ones together, large ones soon.

    Passing a gradient while it is in the cache, and reusing its memory for the next, is much
    cheaper than collecting all first. Branches that lead to one parameter wait for each other, so
    that its gradient is accumulated once. Gradients that tensor ranks sum wait for the end: ranks
    with shards of other sizes would otherwise reach these collectives in another order.
    """

    def __init__(self, junctions: Sequence[Junction], *, retain_graph: bool) -> None:
        self._junctions = junctions
        self._retain_graph = retain_graph
        self._starts: list[GradientEdge] = []
        self._gradients: list[torch.Tensor] = []
        self._bytes = 0
        self._shared: frozenset[Node] | None = None

    def add(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Add the gradient that arrives at ``edge``, which no one else may reference."""
        self._starts.append(edge)
        self._gradients.append(gradient)
        self._bytes += gradient.nbytes
        if self._bytes >= _SOON:
            self._hand_over()

    def finish(self) -> None:
        """Pass the rest to autograd."""
        if self._starts:
            starts, gradients = tuple(self._starts), tuple(self._gradients)
            self._starts, self._gradients = list[GradientEdge](), list[torch.Tensor]()
            # Each gradient fits its edge: skip the checks of `torch.autograd.backward`.
            run_engine(
                starts,
                gradients,
                self._retain_graph,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _hand_over(self) -> None:
        """Pass on the branches that share no parameter with another."""
        if self._shared is None:
            self._shared = _shared(self._junctions)
        now: list[tuple[GradientEdge, torch.Tensor]] = []
        later: list[tuple[GradientEdge, torch.Tensor]] = []
        for pair in zip(self._starts, self._gradients, strict=True):
            (later if pair[0].node in self._shared else now).append(pair)
        self._starts, self._gradients = [e for e, _ in now], [g for _, g in now]
        now.clear()  # else the gradients stay alive until the pass has ended
        self.finish()
        self._starts, self._gradients = [e for e, _ in later], [g for _, g in later]
        self._bytes = 0


def _shared(junctions: Iterable[Junction]) -> frozenset[Node]:
    """Return the first nodes of branches that must not run alone.

    Such a branch shares a node with another, or leads to a leaf with `is_summed_at_end`.
    """
    firsts: list[Node] = []
    for junction in junctions:
        following = junction.node.next_functions if junction.edges else ()
        firsts += [following[edge][0] for edge in junction.edges] or [junction.node.node]
    owners: dict[Node, int] = {}
    found: set[Node] = set()
    for branch, first in enumerate(firsts):
        stack, seen = [first], {first}
        while stack:
            node = stack.pop()
            other = owners.setdefault(node, branch)
            if other != branch:
                found |= {firsts[other], first}
            if hasattr(node, "variable") and is_summed_at_end(node.variable):
                found.add(first)
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    stack.append(below)
    return frozenset(found)


def _inside_backward(collect: Callable[[], None]) -> None:
    """Call ``collect`` from within a backward pass of autograd.

    Checkpoints then recompute once, and not for each saved tensor.
    """
    start = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        end = start.clone()

    def run(_: torch.Tensor) -> None:
        collect()

    end.register_hook(run)
    # Pass no `inputs`: nodes that run meanwhile would skip gradients that these do not need.
    end.backward()


# ------------------------------------------------------- the weight half of one autograd node

# When autograd runs a node that mixes activations with parameters, it cannot be told to skip the
# gradients of activations. So common nodes have a rule here, which uses what the forward has saved.
# Any other node is run in full: correct, but as costly as both halves. Functions written in Python
# are run with ``needs_input_grad`` set to the half.


def weight_gradients(
    node: Node, gradients: Gradients, edges: Sequence[int], hooks: Iterable[Hook] = ()
) -> list[Any]:
    """Compute the gradients of ``node`` along ``edges`` (indices of ``next_functions``), in order.

    ``gradients`` are those of the node's outputs, None for outputs that have none. ``hooks`` are
    what users have registered on the node.
    """
    found = _computed(node, gradients, edges)
    for hook in hooks:
        whole: list[Any] = [None] * len(node.next_functions)
        for edge, value in zip(edges, found, strict=True):
            whole[edge] = value
        changed = hook(tuple(whole), tuple(gradients))
        if changed is not None:
            found = [changed[edge] for edge in edges]
    return [
        _fitted(value, node.next_functions[edge]) for value, edge in zip(found, edges, strict=True)
    ]


def _computed(node: Node, gradients: Gradients, edges: Sequence[int]) -> list[Any]:
    rule = RULES.get(type(node).__name__)
    gradient = gradients[0]
    if rule is not None and len(gradients) == 1 and gradient is not None:
        found = rule(node, gradient, edges)
        if found is not None:
            return list(found)
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        whole = node(*gradients)
        return [
            (whole,)[edge] if isinstance(whole, torch.Tensor) else whole[edge] for edge in edges
        ]
    places = _arguments(node, edges)
    needs = node.needs_input_grad
    set_needs(node, edges)
    try:
        whole = node.apply(*_materialized(node, gradients))
    finally:
        node.needs_input_grad = needs
    return [(whole,)[at] if isinstance(whole, torch.Tensor) else whole[at] for at in places]


def _arguments(node: Node, edges: Iterable[int]) -> list[int]:
    """The indices of the arguments of a Python function that its ``edges`` belong to.

    A function has an edge for each tensor among its arguments, and a flag for every argument.
    """
    live = [
        edge for edge, (following, _) in enumerate(node.next_functions) if following is not None
    ]
    needed = [at for at, is_needed in enumerate(node.needs_input_grad) if is_needed]
    places = dict(zip(live, needed, strict=True))
    return [places[edge] for edge in edges]


def _materialized(node: Node, gradients: Gradients) -> list[torch.Tensor | None]:
    """Replace missing gradients by zeros, as autograd does before a Python function."""
    if all(gradient is not None for gradient in gradients):
        return list(gradients)
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if gradient is None
        else gradient
        for gradient, meta in zip(gradients, input_metadata_of(node), strict=True)
    ]


def reads_hooked(node: Node) -> bool:
    """Whether saved tensors that `weight_gradients` reads of ``node`` may be packed by hooks.

    A checkpoint packs them so, and recomputes all of them in each pass of autograd.
    """
    names = ACTIVATIONS.get(type(node).__name__)
    return names is None or any(may_be_packed(node, name) for name in names)


def set_needs(node: Node, edges: Iterable[int]) -> None:
    """Make a Python function compute the gradients that it sends along ``edges`` only."""
    wanted = frozenset(_arguments(node, edges))
    node.needs_input_grad = tuple(at in wanted for at in range(len(node.needs_input_grad)))


def _fitted(value: torch.Tensor | None, edge: tuple[Node, int]) -> torch.Tensor | None:
    """Convert ``value`` to the shape and dtype that the receiving node expects, like autograd."""
    if value is None or edge[0] is None:
        return None
    expected = input_metadata_of(edge[0])[edge[1]]
    if value.shape != expected.shape:
        value = value.sum_to_size(expected.shape)
    return value.to(expected.dtype)


def _addmm(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    if 1 in edges or gradient.is_complex():
        return None
    found = []
    for edge in edges:
        if edge == 0:
            found.append(_times(gradient, saved(node, "beta")))
        else:
            right = _right(gradient, saved(node, "mat1"), saved(node, "mat2_sym_strides"))
            found.append(_times(right, saved(node, "alpha")))
    return found


def _mm(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    # The right factor is the weight; a branch through the left one is left to autograd.
    if tuple(edges) != (1,) or gradient.is_complex():
        return None
    return [_right(gradient, saved(node, "self"), saved(node, "mat2_sym_strides"))]


def _right(gradient: torch.Tensor, left: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Compute the gradient of the right factor of a product, laid out as the factor is."""
    if strides[0] == 1:
        return (gradient.t() @ left).t()
    return left.t() @ gradient


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value if factor == 1 else value * factor


def _layer_norm(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    if 0 in edges:
        return None
    found = torch.ops.aten.native_layer_norm_backward(
        gradient,
        saved(node, "input"),
        saved(node, "normalized_shape"),
        saved(node, "result1"),
        saved(node, "result2"),
        saved(node, "weight"),
        saved(node, "bias"),
        [False, 1 in edges, 2 in edges],
    )
    return [found[edge] for edge in edges]


def _multiply(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    if gradient.is_complex():
        return None
    return [gradient * (saved(node, "self") if edge else saved(node, "other")) for edge in edges]


def _add(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    if gradient.is_complex():
        return None
    return [_times(gradient, saved(node, "alpha") if edge else 1) for edge in edges]


def _convolution(node: Node, gradient: torch.Tensor, edges: Sequence[int]) -> Found:
    if 0 in edges:
        return None
    found = torch.ops.aten.convolution_backward(
        gradient,
        saved(node, "input"),
        saved(node, "weight"),
        saved(node, "bias_sym_sizes_opt"),
        saved(node, "stride"),
        saved(node, "padding"),
        saved(node, "dilation"),
        saved(node, "transposed"),
        saved(node, "output_padding"),
        saved(node, "groups"),
        [False, 1 in edges, 2 in edges],
    )
    return [found[edge] for edge in edges]


RULES: Mapping[str, Callable[[Node, torch.Tensor, Sequence[int]], Found]] = MappingProxyType(
    {
        "AddmmBackward0": _addmm,
        "MmBackward0": _mm,
        "NativeLayerNormBackward0": _layer_norm,
        "MulBackward0": _multiply,
        "AddBackward0": _add,
        "ConvolutionBackward0": _convolution,
    }
)
"""By the name of the node. A rule reads each saved tensor once, as checkpoints demand, and returns
None for what it does not cover."""
