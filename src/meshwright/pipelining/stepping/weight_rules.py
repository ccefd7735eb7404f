"""The weight half of one autograd node: gradients along edges to parameters, and only those.

When autograd runs a node that mixes activations with parameters, it cannot be told to skip the
gradients of activations. So common nodes have a rule here, which uses what the forward has saved.
Any other node is run in full: correct, but as costly as both halves. Functions written in Python
are run with ``needs_input_grad`` set to the half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from meshwright.torch_internals.autograd import ACTIVATIONS, input_metadata_of, may_be_packed, saved

Gradients = Sequence[torch.Tensor | None]
Node = Any  # torch has no public type with the attributes of a node
Found = Sequence[torch.Tensor | None] | None
Hook = Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
"""A hook of a node's ``register_hook``: takes grad_inputs and grad_outputs."""


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
