"""Functions that compilers skip, and the compiler if a program has loaded it.

Importing this file does not import the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from meshwright.torch_internals.required import required

P = ParamSpec("P")
T = TypeVar("T")

not_traced = required("torch._compile._disable_dynamo", "keeps communication out of graphs")
"""A decorator: a graph ends before a call of the function, and the next begins after it."""
_action = required("torch._C._dynamo.eval_frame._FrameAction", "keeps its hooks out of graphs")
_strategy = required(
    "torch._C._dynamo.eval_frame._FrameExecStrategy", "keeps its hooks out of graphs"
)
_set_strategy = required(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", "keeps its hooks out of graphs"
)

_trace = required("torch._guards.TracingContext.try_get", "knows which graph is traced")

COMPILER_MODULES = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.cpp_builder",
)
"""Modules that the first call of a compiled function loads: they may be loaded before."""
GRAPH_BREAKS = "torch._dynamo.symbolic_convert.__graph_breaks"
"""The logger of graph breaks, what ``TORCH_LOGS=graph_breaks`` shows."""
GRAPH_OPERATORS = ("torch._library", "torch._higher_order_ops")
"""The packages of functions that a graph has as operators."""


def keep_result(function: Callable[P, T]) -> Callable[P, T]:
    """Call ``function`` once in a trace, which keeps its result as a constant.

    Like `torch.compiler.assume_constant_result`, which would import the compiler now.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def as_part_of_caller(function: Callable[P, T]) -> Callable[P, T]:
    """Start no graph at ``function``: it is traced as a part of its caller, or not at all."""
    _set_strategy(function.__code__, _strategy(_action.SKIP, _action.DEFAULT))
    return function


def never_first(function: Callable[P, T]) -> Callable[P, T]:
    """Start no graph at ``function`` or at functions it calls."""
    _set_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
    return function


def is_backward_compiled() -> bool:
    """True in a backward pass that compiled autograd runs or traces."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.in_compiled_autograd_region)


def notes_of_trace() -> dict[str, object]:
    """Return notes on the graph being traced, which end with it; an empty dict outside of one."""
    context = _trace()
    return {} if context is None else context.__dict__.setdefault("meshwright", {})
