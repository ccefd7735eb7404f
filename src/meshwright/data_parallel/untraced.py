"""Functions that `torch.compile` calls and does not look into, or only as a part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

__all__ = ["inlined", "untraced"]

P = ParamSpec("P")
T = TypeVar("T")


@_disable_dynamo
def untraced(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns. A compiled graph ends before it, and another begins behind it.

    For hooks that communicate: a graph would keep tensors that are given back after it.
    """
    return function(*args, **kwargs)


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which is traced as a part of its caller or runs uncompiled, and not by halves.

    What it calls may be compiled then. For functions that mark gradients: a graph that breaks
    inside of them would have marks that belong to no forward.
    """
    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function
