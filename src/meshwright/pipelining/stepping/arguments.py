"""The arguments of a stage's forward: compared before anything runs, copied if it writes to them.

What a stage receives is a leaf of its graph, because its gradient goes back from there, and
autograd lets nobody write to a leaf. Microbatches are views of one batch, of which autograd takes a
write to one for a write to all. A stage that is seen to write in place is given copies of both.
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
    """The ways in which the module of a stage has been called, which it takes."""

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

    ``args`` are None where they come from other stages. Nothing is known, and so nothing is said,
    of modules that are called in ways of their own: with hooks before them, or by a class.
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
    """Check that a part of ``module`` says that it writes in place, or its graph does."""
    return any(
        getattr(part, "inplace", False)
        or (isinstance(part, fx.GraphModule) and any(map(_is_mutable, part.graph.nodes)))
        for part in module.modules()
    )


def _is_mutable(node: fx.Node) -> bool:
    """Check that ``node`` writes to a value; to a buffer it may."""
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
    """Advise about ``error``, where it is about writing to what was received."""
    text = str(error)
    if "leaf Variable that requires grad" not in text or "in-place operation" not in text:
        return ""
    return (
        "; the stage writes in place to what it has received from another stage: let its first "
        "operation make a new tensor (y = x + 1 for x += 1, relu for relu_), or clone its input"
    )
