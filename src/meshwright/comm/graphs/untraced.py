"""Functions that `torch.compile` calls and does not look into, or only as a part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

__all__ = ["apart", "constant", "inlined", "untraced"]

P = ParamSpec("P")
T = TypeVar("T")


@_disable_dynamo
def untraced(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``. A compiled graph ends before it, and another begins behind it.

    For hooks that communicate: a graph would keep tensors that are given back after it.
    """
    return function(*args, **kwargs)


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which a trace calls once and whose result it keeps.

    As `torch.compiler.assume_constant_result`, which would load the compiler now.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which is traced as a part of its caller or runs uncompiled, and not by halves.

    What it calls may be compiled then. For functions that mark gradients: a graph that breaks
    inside of them would have marks that belong to no forward.
    """
    return _unframed(function, eval_frame._FrameAction.DEFAULT)


def apart(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, whose frame no compiler begins with, nor with those that it calls.

    For hooks that ask `torch.compiler.is_compiling` and take the way of `untraced`. Between graphs
    they are called as they are; without a compiler this costs nothing.
    """
    return _unframed(function, eval_frame._FrameAction.SKIP)


def _unframed(function: Callable[P, T], below: eval_frame._FrameAction) -> Callable[P, T]:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, below)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
