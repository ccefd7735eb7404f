"""The arguments of a stage's forward: checked before anything runs, copied if it writes to them.

A received value is a leaf of the stage's graph, whose gradient is sent back, and autograd rejects
in-place writes to a leaf. Microbatches are views of one batch, and autograd takes a write to one
for a write to all. A stage that is known to write in place gets copies of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from meshwright.torch_internals.modules import compiled_call_of, forward_pre_hooks_of
from meshwright.torch_internals.tensors import any_schema_of, is_view
from meshwright.torch_internals.trees import tree_map_only


class CallCheck:
    """Checks the arguments of a stage's module, once for each change of their number and names."""

    def __init__(self) -> None:
        self._seen: object = None

    def look(
        self,
        module: nn.Module,
        name: str,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        takes_args: bool,
    ) -> None:
        """Raise ``ValueError`` for microbatches that ``module`` cannot be called with."""
        called = ({*map(len, args)}, {*map(tuple, kwargs)})
        if called == self._seen:
            return
        for given, named in zip(args, kwargs or [{}] * len(args), strict=True):
            _check(module, name, given if takes_args else None, named)
        self._seen = called


def _check(
    module: nn.Module, name: str, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` for arguments of a batch that ``module`` cannot be called with.

    ``args`` are None where they come from other stages. Modules with a ``__call__`` of their own,
    forward pre-hooks or a compiled call are not checked: their arguments are unknown.
    """
    is_own = type(module).__call__ is not nn.Module.__call__
    if is_own or forward_pre_hooks_of(module) or compiled_call_of(module) is not None:
        return
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of C, or of a script
        return
    try:
        if args is None:
            signature.bind_partial(**kwargs)
        else:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        given = [] if args is None else [f"{len(args)} positional arguments"]
        given += [f"the keywords {list(kwargs)}"] if kwargs else []
        raise ValueError(
            f"{name} expects the arguments ({taken}) of {type(module).__name__}, but this step got "
            f"{' and '.join(given)}: {error}. The target of the last stage goes by target="
        ) from error


def writes_in_place(module: nn.Module) -> bool:
    """Whether a part of ``module`` has ``inplace`` set, or a graph that writes in place."""
    return any(
        getattr(part, "inplace", False)
        or (isinstance(part, fx.GraphModule) and any(map(_is_mutable, part.graph.nodes)))
        for part in module.modules()
    )


def _is_mutable(node: fx.Node) -> bool:
    """Whether ``node`` writes to a value other than a buffer."""
    schema = any_schema_of(node.target)
    if node.op != "call_function" or not getattr(schema, "is_mutable", False) or not node.args:
        return False
    written = node.args[0]
    return isinstance(written, fx.Node) and written.op != "get_attr"


def copies(values: Any) -> Any:  # noqa: ANN401 - any nested values
    """Return ``values`` with copies of views, and of tensors that require gradients."""
    return tree_map_only(torch.Tensor, _copy, values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad or is_view(tensor) else tensor


def advice(error: Exception) -> str:
    """Advice for an ``error`` about an in-place write to a received value; empty for others."""
    text = str(error)
    if "leaf Variable that requires grad" not in text or "in-place operation" not in text:
        return ""
    return (
        "; the stage writes in place to what it has received from another stage: let its first "
        "operation make a new tensor (y = x + 1 for x += 1, relu for relu_), or clone its input"
    )
