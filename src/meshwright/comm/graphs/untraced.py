"""Functions that `torch.compile` calls without tracing them, or treats as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from meshwright.torch_internals.tracing import (
    as_part_of_caller,
    keep_result,
    never_first,
    not_traced,
)

P = ParamSpec("P")
T = TypeVar("T")


@not_traced
def untraced(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` untraced: a compiled graph ends before it, and the next begins after it.

    For hooks that communicate: a graph would keep tensors alive that are freed after it.
    """
    return function(*args, **kwargs)


constant = keep_result
"""A decorator: traces call the function once and keep its result."""


inlined = as_part_of_caller
"""A decorator: the function is traced as a part of its caller or runs uncompiled, never in part.

What it calls may be compiled then. For functions that mark gradients: a graph that breaks inside of
them would have marks that belong to no forward."""

apart = never_first
"""A decorator: no compiler begins with the function's frame, nor with those that it calls.

For what runs beside graphs: implementations of operators, and hooks that ask
`torch.compiler.is_compiling` and then call through `untraced`. Not for a hook that chooses in a
trace where gradients are reduced. Without a compiler this costs nothing."""
