"""Watch over a forward that is traced, for what its graph will not have.

A graph has operators and nothing else. Hooks that the model puts on tensors, the backward of an
`autograd.Function` and what happens to tensors that are saved for the backward would be dropped
without an error, and with them a part of the gradient.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from meshwright.comm.dtensors.subclasses import has_calls
from meshwright.pipelining.splitting.module_hooks import key_in_trace
from meshwright.torch_internals.autograd import function_class, saved_tensor_hooks
from meshwright.torch_internals.tracing import GRAPH_OPERATORS
from meshwright.torch_internals.trees import tree_leaves

HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Methods that leave something on a tensor for its backward."""
_TORCH = str(Path(torch.__file__).parent)
_INSTEAD = (
    "Leave it out, let the model be a chain of modules that do it inside (its forward calls one "
    "after the other and nothing else), or give modules of your own to PipelineStage"
)


@contextlib.contextmanager
def watched_forward(model: nn.Module) -> Iterator[None]:
    """Raise ValueError behind the block where its forward of ``model`` does what is dropped."""
    watch = _Watch(model)
    handle = model.register_forward_hook(watch.look)
    try:
        # What has a gradient is known by its graph, also where the caller wants none.
        with watch, torch.enable_grad():
            yield
    finally:
        handle.remove()
    if watch.found:
        raise ValueError(
            "a traced stage is a graph of operators, which would drop what the model does beside "
            f"them: {'; '.join(watch.found)}. {_INSTEAD}"
        )


def refuse_subclasses(model: nn.Module) -> None:
    """Raise ValueError for a parameter or buffer that computes by calls of its own."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_calls(tensor):
            raise ValueError(
                "a traced stage is a graph of operators on plain tensors, which would drop what "
                f"{name!r}, a {type(tensor).__name__}, does in calls of its own. {_INSTEAD}"
            )


def _recomputes() -> bool:
    """Check that a reentrant checkpoint runs, which without gradients leaves no node of its own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


class _Watch(TorchFunctionMode):
    """Sees all functions that a forward calls, and the autograd graph behind its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {key_in_trace(part): name for name, part in model.named_modules()}
        self._before = saved_tensor_hooks()
        self.found: dict[str, None] = {}
        """In words, in order."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Note what a graph does not keep, and call the function."""
        name = getattr(func, "__name__", "")
        if not torch.is_grad_enabled() and _recomputes():
            self.found[
                f"reentrant torch.utils.checkpoint {self._place()}, whose backward is none of its "
                "operators': pass use_reentrant=False, where it lies inside of a module of a chain"
            ] = None
        if name in HOOKING:
            self.found[f"Tensor.{name} {self._place()}"] = None
        elif saved_tensor_hooks() is not self._before and (place := self._place()):
            self.found[
                f"torch.utils.checkpoint or saved_tensors_hooks {place}, where a graph keeps all "
                "activations"
            ] = None
        return func(*args, **(kwargs or {}))

    def look(self, module: nn.Module, args: object, output: object) -> None:
        """Note functions with a backward of their own: the forward hook of the model.

        Raises TypeError for an output in which a trace finds no tensors.
        """
        for leaf in tree_leaves(output):
            if is_dataclass(leaf):
                name = type(leaf).__qualname__
                raise TypeError(
                    f"the model returns the dataclass {name}, in which a trace finds no tensors: "
                    f'call torch.export.register_dataclass({name}, serialized_type_name="{name}") '
                    "before"
                )
        stack: list[Any] = [
            leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
        ]
        seen: set[object] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                function = function_class(node)
                is_noted = function is CheckpointFunction
                if not is_noted and not function.__module__.startswith(GRAPH_OPERATORS):
                    self.found[
                        f"the backward of {function.__module__}.{function.__qualname__}, an "
                        "autograd.Function (torch.library.custom_op with register_autograd makes "
                        "an operator of it)"
                    ] = None
            stack.extend(following for following, _ in node.next_functions)

    def _place(self) -> str:
        """Find the innermost module of the user's that is running, and its line."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            name = self._names.get(key_in_trace(owner)) if isinstance(owner, nn.Module) else None
            if name is not None and not code.co_filename.startswith(_TORCH):
                where = f"module {name!r}" if name else "the model"
                return f"in {where} ({code.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
        return ""
