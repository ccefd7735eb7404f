"""Tensors without values: shape and dtype are known; reading values raises and says why.

They stay the same objects, so that parameter groups and lists of parameters keep working, but their
memory is freed. Used for parameters that are on other ranks or were replaced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import is_dtensor
from meshwright.comm.dtensors.subclasses import dispatches
from meshwright.torch_internals.autograd import STATE_OF_TENSORS
from meshwright.torch_internals.tensors import (
    local_tensor_of,
    set_local_tensor,
    without_function,
)
from meshwright.torch_internals.trees import tree_leaves

_WHY = "_meshwright_why"
_FACTS = """
    __hash__ __len__ device dim dtype element_size get_device grad_fn is_complex is_cpu is_cuda
    is_floating_point is_leaf is_meta is_nested is_quantized is_sparse itemsize layout names ndim
    ndimension nelement numel requires_grad retains_grad shape size stride
"""
FACTS = frozenset(STATE_OF_TENSORS) | frozenset(_FACTS.split())
"""The names of torch's functions and attributes that need no value."""
SETTINGS = frozenset(
    {"grad", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
)
"""The names of what may be asked of a parameter on every rank alike."""


class _Why(NamedTuple):
    """Why a tensor has no values, and the error for reading it."""

    text: str
    error: type[Exception]
    remedy: str
    allowed: frozenset[str]


class Unreadable:
    """A tensor without values: shape and dtype are known, reading values raises."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - a function or the getter of an attribute
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Answer what needs no values. Everything else raises `make_unreadable`'s error."""
        given = [*args, *tree_leaves((args, dict(kwargs or {})))]
        why = next(vars(value)[_WHY] for value in given if isinstance(value, Unreadable))
        if name_of(func) not in why.allowed:
            raise why.error(f"{why.text}. {why.remedy}")
        with without_function():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"<{vars(self)[_WHY].text}>"


def name_of(func: object) -> str:
    """Return the name of a torch function, or of the attribute that is read or set."""
    found = getattr(func, "__name__", "")
    of = getattr(func, "__self__", None)
    return getattr(of, "__name__", found) if found in ("__get__", "__set__") else found


def retire(parameter: nn.Parameter, name: str, moment: str) -> None:
    """Make ``parameter`` unreadable, because another one replaced it at ``moment``.

    Code that has collected it earlier would read and train a parameter that is no longer used. So
    reading its gradient raises, too: an optimizer silently skips a parameter without a gradient.
    Keeping a reference raises nothing.
    """
    make_unreadable(
        parameter,
        f"this is parameter {name!r} as it was before {moment}: another one is trained in its "
        "place",
        "Collect parameters from module.parameters() after that: for optimizers, penalties, "
        "averages, and lists that a forward reads",
    )


def make_unreadable(
    tensor: torch.Tensor,
    text: str,
    remedy: str,
    *,
    error: type[Exception] = RuntimeError,
    settings: frozenset[str] = frozenset(),
) -> None:
    """Free the memory of ``tensor``; only `FACTS` and ``settings`` can still be read.

    Everything else raises ``error`` with ``text``, the reason, and ``remedy``. One element is left,
    NaN where the dtype has it, in case code bypasses the checks.
    """
    why = _Why(text, error, remedy, FACTS | settings)
    if isinstance(tensor, Unreadable):
        vars(tensor)[_WHY] = why
        return
    kind = type(tensor)
    tensor.grad = None
    if is_dtensor(tensor):
        set_local_tensor(tensor, _without_values(local_tensor_of(tensor)))
    elif not dispatches(tensor):  # a wrapper's memory is that of tensors which others may hold
        tensor.data = _without_values(tensor)
    tensor.__class__ = _unreadable(kind)
    vars(tensor)[_WHY] = why


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.new_full((), math.nan if is_number else 0).expand(tensor.shape)


@functools.cache
def _unreadable(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(kind)(kind.__name__, (Unreadable, kind), {})
