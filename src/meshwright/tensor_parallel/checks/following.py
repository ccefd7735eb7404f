"""The layouts of local tensors, followed through the first forward of a model.

A local tensor does not know its layout. In the first forward each output of a style is marked with
its layout; operators that work element by element, or along the features of each token, pass the
mark on, others drop it. A style whose input has another layout than it declares raises before it
sends anything::

    norm (Shard(1)) ──> dropout ──> up (expects Replicate)    found
    norm (Shard(1)) ──> matmul  ──> up (expects Replicate)    not found: a product may be anything

Errors of operators that mix DTensors and plain tensors name the parameter. Later forwards are not
followed and cost nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.comm import Communicator
from meshwright.comm.dtensors.dtensor import AnyPlacement, known_at_rest
from meshwright.layout import Partial, Placement, Replicate, Shard
from meshwright.torch_internals.modules import forward_hooks_of, forward_pre_hooks_of
from meshwright.torch_internals.tensors import function_depth, function_modes
from meshwright.torch_internals.trees import tree_leaves

_MARK = "_meshwright_layout"
_PASSING = frozenset(
    {
        "add",
        "add_",
        "bfloat16",
        "clone",
        "contiguous",
        "div",
        "div_",
        "double",
        "dropout",
        "elu",
        "exp",
        "float",
        "gelu",
        "half",
        "hardtanh",
        "layer_norm",
        "leaky_relu",
        "masked_fill",
        "mish",
        "mul",
        "mul_",
        "neg",
        "pow",
        "relu",
        "rms_norm",
        "rsqrt",
        "rsub",
        "sigmoid",
        "silu",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "sub_",
        "tanh",
        "to",
        "true_divide",
        "type_as",
        "where",
    }
)


class _FollowMark(NamedTuple):
    placement: AnyPlacement
    axis: Communicator
    name: str
    """The module that returned the tensor."""


class _Following(TorchFunctionMode):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = weakref.ref(root)  # whose hooks hold this mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what any function returns
        if torch.compiler.is_compiling():  # a compiled layer, which is not followed
            return func(*args, **(kwargs or {}))
        try:
            found = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            root = self._root()
            if root is None or "got mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(_mixed(root, func, (args, kwargs))) from error
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        name = name.removeprefix("r") if name in ("radd", "rmul", "rtruediv") else name
        if name.replace("truediv", "div") in _PASSING and isinstance(found, torch.Tensor):
            # A broadcast argument does not determine the result's layout, nor do two that disagree.
            marks = [
                vars(arg)[_MARK]
                for arg in args
                if isinstance(arg, torch.Tensor) and _MARK in vars(arg) and arg.shape == found.shape
            ]
            if marks and all(each[:2] == marks[0][:2] for each in marks):
                vars(found)[_MARK] = marks[0]
        return found


def _mixed(root: nn.Module, func: Callable[..., Any], given: object) -> str:
    """The error message for arguments of ``func`` that mix DTensors and plain tensors."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    sides: tuple[list[str], list[str]] = ([], [])
    for tensor in tree_leaves(given):
        if isinstance(tensor, torch.Tensor):
            rest = known_at_rest(tensor)
            name = names.get(id(tensor), "")
            what = f"parameter {name!r}" if name else f"a tensor of shape {tuple(tensor.shape)}"
            sides[rest is None].append(what if rest is None else f"{what} {list(rest.placements)}")
    dtensors, plain = map(" and ".join, sides)
    return (
        f"{getattr(func, '__name__', func)} in {type(root).__name__}: expected local tensors alone "
        f"or DTensors alone, found DTensors ({dtensors}) mixed with plain tensors ({plain}). Give "
        "the module that computes a style, let the one before return local tensors "
        "(use_local_output=True), or use to_local() or full_tensor() of the parameter"
    )


def follow_first_forward(module: nn.Module, check: Callable[[nn.Module], None]) -> None:
    """Follow layouts through the next eager forward of ``module``.

    Also through the one after it, if that has made buffers DTensors. The forward begins with
    ``check``: until then, several calls may have applied styles.
    """
    mode = _Following(module)
    before: set[str] = set()

    def begin(module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        check(module)
        _remove(forward_pre_hooks_of(module), begin)
        before.update(_spread_buffers(module))
        mode.__enter__()

    def end(module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if mode in function_modes():
            mode.__exit__(None, None, None)
        if sys.exc_info()[0] is not None:
            return  # torch is iterating over the hooks, which must not change meanwhile
        _remove(forward_hooks_of(module), end)
        if not _spread_buffers(module) <= before:
            # A buffer that the forward made from a parameter will meet plain tensors in the next.
            follow_first_forward(module, check)

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)


def _spread_buffers(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_buffers() if known_at_rest(each) is not None}


def mark(
    tensor: torch.Tensor, placement: AnyPlacement, axis: Communicator, name: str
) -> torch.Tensor:
    """Mark the output ``tensor`` of module ``name``, while layouts are followed."""
    if _is_following() and not isinstance(placement, Partial):
        vars(tensor)[_MARK] = _FollowMark(placement, axis, name)
    return tensor


def check_mark(tensor: torch.Tensor, declared: Placement, axis: Communicator, name: str) -> None:
    """Raise ValueError if the mark of ``tensor`` differs from ``declared``."""
    found = vars(tensor).get(_MARK) if _is_following() else None
    if found is None or found.axis != axis or found.placement == declared:
        return
    hint = (
        f"set input_layouts={found.placement} on {name}, or output_layouts={declared} on "
        f"{found.name}, or put PrepareModuleInput between them"
    )
    if not isinstance(found.placement, Shard | Replicate):
        hint = f"{found.name} gives parts of several matrices, which have to be split first"
    raise ValueError(
        f"{name}: expected an input placed {declared}, found the output of {found.name} (shape "
        f"{tuple(tensor.shape)}), which is placed {found.placement}: {hint}"
    )


def _is_following() -> bool:
    if torch.compiler.is_compiling() or not function_depth():
        return False
    return any(isinstance(mode, _Following) for mode in function_modes())


def _remove(hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> None:
    for key in [key for key, found in hooks.items() if found is hook]:
        del hooks[key]
