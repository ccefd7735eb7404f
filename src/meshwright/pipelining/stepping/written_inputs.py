"""Stages that write to what they have received.

What a stage receives is a leaf of its graph, because its gradient goes back from there, and
autograd lets nobody write to a leaf. Microbatches are views of one batch, of which autograd takes a
write to one for a write to all. A stage that is seen to write in place is given copies of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from meshwright.torch_internals.tensors import any_schema_of, is_view
from meshwright.torch_internals.trees import tree_map_only


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
    """``values`` with copies of views, and of tensors that require gradients."""
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
