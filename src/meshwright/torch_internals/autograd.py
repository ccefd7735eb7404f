"""Private parts of autograd: the running backward pass, hooks of tensors, saved values of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from meshwright.torch_internals.required import required

running_backward = required(
    "torch._C._current_graph_task_id", "knows whether a backward pass is under way"
)
"""The number of the backward pass that runs in this thread; -1 outside of one."""
keeps_graph = required(
    "torch._C._autograd._get_current_graph_task_keep_graph", "knows what to free in a backward"
)
"""True where the backward pass under way keeps its graph."""
is_executed = required(
    "torch._C._will_engine_execute_node", "knows which gradients a backward computes"
)
"""True where the backward pass under way goes through a node."""


def accumulates(node: object) -> bool:
    """Check whether the running backward pass accumulates into ``.grad`` at a leaf's ``node``."""
    try:
        return is_executed(node)
    except RuntimeError:  # `torch.autograd.grad` was asked for it, and returns it
        return False


_ENGINE = "torch.autograd.Variable._execution_engine"
at_end_of_backward = required(f"{_ENGINE}.queue_callback", "ends its part of a backward")
"""Call a function of no arguments when the backward pass under way has ended."""
run_engine = required(f"{_ENGINE}.run_backward", "runs the halves of a backward")
"""Run a backward pass. The arguments are those of torch's engine."""
keeps_versions = required(
    "torch.autograd._unsafe_preserve_version_counter", "fills gathered parameters anew"
)
"""Context manager: writes to a tensor in the block do not raise its version counter."""
is_profiled = required("torch.autograd._profiler_enabled", "adds ranges to profiles")
function_transforms = required(
    "torch._C._functorch.peek_interpreter_stack", "refuses transforms of functions by name"
)
"""The innermost transform of `torch.func` that runs; None outside of them."""
outside_of_transforms = required(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "communicates in the midst of a transform",
)
"""Context manager: no transform of `torch.func` is active in the block."""
_is_transformed = required(
    "torch._C._functorch.is_functorch_wrapped_tensor", "sends tensors of transforms"
)
_unwrapped = required("torch._C._functorch.get_unwrapped", "sends tensors of transforms")
forward_level = partial(
    attrgetter("_current_level"),
    required("torch.autograd.forward_ad", "refuses forward-mode differentiation"),
)
"""The level of forward-mode differentiation that runs; -1 outside of it."""
_saved_tensor_hooks = required(
    "torch._C._autograd._top_saved_tensors_default_hooks", "refuses hooks of saved tensors"
)

STATE_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks", "_version")
"""Attributes that autograd reads of any tensor."""
backward_hooks_of = attrgetter("_backward_hooks")
"""The hooks that ``register_hook`` has put on a tensor: a dict, or None."""
after_hooks_of = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of ``register_post_accumulate_grad_hook``: a dict, or None."""
input_metadata_of = attrgetter("_input_metadata")
"""The shape and dtype of each gradient that a node receives."""


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap ``tensor`` from all transforms of `torch.func`, down to the tensor with memory."""
    while _is_transformed(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def set_backward_hooks(tensor: torch.Tensor, hooks: Any) -> None:  # noqa: ANN401
    """Set the hooks of a tensor to a result of `backward_hooks_of`; None removes them."""
    tensor._backward_hooks = hooks


def set_after_hooks(tensor: torch.Tensor, hooks: Any) -> None:  # noqa: ANN401
    """Set the hooks of a tensor to a result of `after_hooks_of`; None removes them."""
    tensor._post_accumulate_grad_hooks = hooks


def saved_tensor_hooks() -> object:
    """Return the innermost active hooks on tensors that autograd saves; None without any."""
    return _saved_tensor_hooks(True)


ACTIVATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "AddmmBackward0": ("mat1",),
        "MmBackward0": ("self",),
        "NativeLayerNormBackward0": ("input",),
        "MulBackward0": ("self", "other"),
        "AddBackward0": (),
        "ConvolutionBackward0": ("input",),
    }
)
"""By the name of a node: the activations it has saved that gradients of weights need."""
NODES = tuple(f"{n}._raw_saved_{name}" for n, names in ACTIVATIONS.items() for name in names)
"""The attributes of nodes' classes by which `may_be_packed` reads them."""
for _name in NODES:
    required(f"torch._C._functions.{_name}", "computes gradients of weights alone")


def saved(node: Any, name: str) -> Any:  # noqa: ANN401 - nodes have no public type
    """Read the value that a node has saved for its backward as ``name``."""
    return getattr(node, f"_saved_{name}")


def may_be_packed(node: Any, name: str) -> bool:  # noqa: ANN401
    """Check whether a hook may have packed the tensor that ``node`` has saved as ``name``."""
    return getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", True) is not None


def function_class(node: object) -> Callable[..., Any]:
    """Return the `torch.autograd.Function` that a Python node runs."""
    return getattr(type(node), "_forward_cls", type(node))


@cache
def held_nodes_live() -> bool:
    """Check whether a reference keeps a Python node usable; in torch 2.11 its graph must live."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
            return x.view_as(x)

    with torch.enable_grad():
        # The output goes away at once: nothing else holds the graph.
        node: Any = Same.apply(torch.ones((), device="cpu", requires_grad=True)).grad_fn
    try:
        return bool(node.next_functions)
    except RuntimeError:
        return False
