"""Functions that `torch.compile` calls and does not look into, or only as a part of a graph."""

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
    """Call ``function``. A compiled graph ends before it, and another begins behind it.

    For hooks that communicate: a graph would keep tensors that are given back after it.
    """
    return function(*args, **kwargs)


constant = keep_result
"""A decorator: traces call the function once and keep its result."""


inlined = as_part_of_caller
"""A decorator: the function is traced as a part of its caller or runs uncompiled, not by halves.

What it calls may be compiled then. For functions that mark gradients: a graph that breaks inside of
them would have marks that belong to no forward."""

apart = never_first
"""A decorator: no compiler begins with the function's frame, nor with those that it calls.

For hooks that ask `torch.compiler.is_compiling` and take the way of `untraced`. Between graphs they
are called as they are; without a compiler this costs nothing."""
