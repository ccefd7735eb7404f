"""Ways to compile: scoped settings, a compiled backward, and a backend without code generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from meshwright.compiler.marking import MARKING, fuse
from meshwright.torch_internals.compile import (
    aot_autograd,
    backward_compiler,
    compile_graph,
    functorch_settings,
    make_boxed_func,
)
from meshwright.torch_internals.modules import set_compiled_call

__all__ = ["aot_backend", "compile_module", "compiled_autograd"]

M = TypeVar("M", bound=nn.Module)

CompilerFunction = Callable[[fx.GraphModule], Callable[..., Any]]


def compile_module(module: M, *, fullgraph: bool = False, dynamic: bool | None = None) -> M:
    """Compile ``module`` in place, with the gradient reductions inside of its graphs.

    As ``module.compile()``, but the settings that this needs hold for its graphs alone, and views
    are computed anew in the backward pass: what they look at is kept, and serves what else is
    computed from it. Names and state dict stay as they are. ``fullgraph`` and ``dynamic`` are those
    of `torch.compile`.
    """
    MARKING.scoped.update(module.modules())
    if (module.forward.__module__ or "").startswith("torch."):  # None for what torch.fx has written
        call = torch.compile(
            MARKING.frame(module), backend=_inductor, fullgraph=fullgraph, dynamic=dynamic
        )
        set_compiled_call(module, call)
    else:
        module.compile(backend=_inductor, fullgraph=fullgraph, dynamic=dynamic)
    return module


@contextlib.contextmanager
def compiled_autograd(
    compiler_fn: CompilerFunction | None = None, *, dynamic: bool = True
) -> Iterator[None]:
    """Backward passes in the block are compiled, with the hooks of replicated modules.

    ``compiler_fn`` compiles the graph of a backward pass; `torch.compile` does when it is left out.
    The settings that this needs are undone at the end of the block.

    Raises RuntimeError where torch has no such switch.
    """
    enable = backward_compiler()
    if enable is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot compile backward passes (it has no "
            "torch._dynamo.compiled_autograd._enable): compile the forward alone"
        )
    with MARKING.scope(), enable(compiler_fn or torch.compile, dynamic=dynamic):
        yield


def _inductor(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    # Where a view of an activation is kept for a product, its sign is kept beside it: one byte an
    # element, which generated code of the CPU writes eight times slower than a float.
    with functorch_settings.patch(recompute_views=True):
        compiled = compile_graph(graph, inputs, options=dict(MARKING.settings()))
    return cast("Callable[..., Any]", compiled)


def _fuse_and_run(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    fuse(graph.graph)
    graph.recompile()
    return make_boxed_func(graph.forward)


aot_backend = aot_autograd(fw_compiler=_fuse_and_run, bw_compiler=_fuse_and_run)
"""A backend for `torch.compile`: reductions are fused, nodes run in the graph's order, no code is
generated. For tests, and for models whose code generation fails."""
