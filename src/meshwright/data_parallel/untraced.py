"""Functions that `torch.compile` calls and does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

__all__ = ["untraced"]

P = ParamSpec("P")
T = TypeVar("T")


@_disable_dynamo
def untraced(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns. A compiled graph ends before it, and another begins behind it.

    For hooks that communicate: a graph would keep tensors that are given back after it.
    """
    return function(*args, **kwargs)
