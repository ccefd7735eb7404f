"""Functions of torch that a simulated device replaces: backward passes, memory, wrappers.

Each is a context manager in which our function replaces torch's and receives the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as bindings

from meshwright.torch_internals.required import required

Call = Callable[..., Any]
_HAS_CONSTRUCTOR = (bindings.Backend.__init__.__doc__ or "").startswith("__init__(")
BackendBase: Any = bindings.Backend if _HAS_CONSTRUCTOR else object
"""The class of backends that groups are split from, where Python can make one: from torch 2.14."""
without_modes = required(
    "torch.utils._python_dispatch._disable_current_modes", "moves data unseen by dispatch modes"
)
"""A block without dispatch modes."""
without_functions = required("torch._C.DisableTorchFunction", "runs operators unseen")
"""A block in which neither function modes nor ``__torch_function__`` are asked."""
operator_modes = required(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "sees dispatch modes"
)
"""Lists the dispatch modes of this thread, the outermost first."""
_push_operators = required("torch.utils._python_dispatch._push_mode", "gives modes to a thread")
_pop_operators = required("torch.utils._python_dispatch._pop_mode", "takes modes from a thread")
_push_functions = required("torch._C._push_on_torch_function_stack", "gives modes to a thread")
_pop_functions = required("torch._C._pop_torch_function_stack", "takes modes from a thread")
required("torch.autograd._engine_run_backward", "sees backward passes of a simulated device")
required("torch.Tensor._make_wrapper_subclass", "makes wrappers on a simulated device")
_CHECKS = required(
    "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
    "lets layers be computed again on a simulated device",
)


@contextlib.contextmanager
def replaced(owner: object, name: str, function: Call, kind: Call | None = None) -> Iterator[None]:
    """Replace attribute ``name`` of ``owner`` in the block; ``function`` gets the original first.

    ``kind`` is `staticmethod` where the attribute is a static method.
    """
    original = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        return function(original, *args, **kwargs)

    setattr(owner, name, kind(stand_in) if kind else stand_in)
    try:
        yield
    finally:
        setattr(owner, name, kind(original) if kind else original)


def running_backward_by(run: Call) -> contextlib.AbstractContextManager[None]:
    """Have ``run`` run backward passes: it gets torch's engine and its arguments."""
    return replaced(torch.autograd, "_engine_run_backward", run)


@contextlib.contextmanager
def having_modes(operators: Sequence[object], functions: Sequence[object]) -> Iterator[None]:
    """Enter in this thread the modes that another thread has entered."""
    for mode in operators:
        _push_operators(mode)
    for mode in functions:
        _push_functions(mode)
    try:
        yield
    finally:
        for _ in functions:
            _pop_functions()
        for _ in operators:
            _pop_operators()


def wrapping_by(make: Call) -> contextlib.AbstractContextManager[None]:
    """Have ``make`` make tensors without memory: it gets torch's function and its arguments."""
    return replaced(torch.Tensor, "_make_wrapper_subclass", make, staticmethod)


@contextlib.contextmanager
def recomputing_on_any_device() -> Iterator[None]:
    """Keep `torch.utils.checkpoint` from comparing the devices of recomputed tensors."""
    look = _CHECKS["default"]

    def looked(tensor: torch.Tensor) -> dict[str, Any]:
        return {name: value for name, value in look(tensor).items() if name != "device"}

    _CHECKS["default"] = looked
    try:
        yield
    finally:
        _CHECKS["default"] = look


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor as they are stored, coalesced or not."""
    return tensor._indices(), tensor._values()
