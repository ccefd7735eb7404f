"""Marked gradients under `torch.compile`: the pass, its settings, and ways to compile with them.

`compile_module` scopes the settings to its module, `compiled_autograd` also compiles backward
passes, and `aot_backend` runs the pass without code generation.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import fx, nn

from meshwright.compiler import bucket_pass, unit_pass
from meshwright.torch_internals import compile as internals
from meshwright.torch_internals.modules import call_of, set_compiled_call
from meshwright.torch_internals.tensors import version_of

M = TypeVar("M", bound=nn.Module)

CompilerFunction = Callable[[fx.GraphModule], Callable[..., Any]]

_log = logging.getLogger("meshwright")

_IN_HOOKS = ("python_reducer", "python_reducer_without_compiled_forward")
"""torch's names for a backward pass whose hooks reduce."""

_CONCAT = "fuse_ddp_with_concat_op"
_COALESCED = "fuse_ddp_with_coalesced_op"


def _fuse(graph: fx.Graph) -> None:
    """Place the units of ``graph``, fuse its marks if it has any, and check the result."""
    MARKING.counters["gathers"] += unit_pass.place_units(graph)
    if not bucket_pass.marks_of(graph):
        return
    before = bucket_pass.peak_bytes(graph)
    plans = bucket_pass.fuse_marks(graph)
    bucket_pass.check_buckets(graph, plans, before)
    MARKING.counters["passes"] += 1
    MARKING.counters["bytes"] += sum(plan.bytes for plan in plans)


class _FusePass(internals.CustomGraphPass):
    """The pass as inductor calls it. It depends on the graph alone."""

    def __call__(self, graph: fx.Graph) -> None:
        _fuse(graph)

    def uuid(self) -> str:
        """Name the version of the pass: compiled graphs are cached under it."""
        return "".join(inspect.getsource(part) for part in (bucket_pass, unit_pass))


class _ApartPass(internals.CustomGraphPass):
    """The pass before a joint graph is partitioned, as inductor calls it."""

    def __call__(self, graph: fx.Graph) -> None:
        unit_pass.keep_apart(graph)

    def uuid(self) -> str:
        """Name the version of the pass: compiled graphs are cached under it."""
        return inspect.getsource(unit_pass)


class _Marking:
    """The `GradientMarking` of `torch.compile`. `MARKING` is its only instance."""

    def __init__(self) -> None:
        self.fuse_pass, self.apart_pass = _FusePass(), _ApartPass()
        self.scoped: WeakSet[nn.Module] = WeakSet()
        """Modules whose compilation scopes its own settings."""
        self.counters: Counter[str] = Counter()
        """``ddp_buckets``: buckets of the graph that ran last. ``passes``: graphs with fused marks.
        ``bytes``: bytes of all fused buckets. ``gathers``: gathers of units in all graphs.
        ``unfused``: marks reduced one by one, because the backend does not run the pass."""
        self._frames: dict[str, CodeType] = {}
        self._depth = 0
        self._warned: set[str] = set()

    def route(self, module: nn.Module | None) -> tuple[str, str]:
        """Return the route of the marks of ``module``, and how buckets are sent, by settings."""
        if not self._depth and module not in self.scoped:
            self._install()
        if internals.dynamo_settings.optimize_ddp not in _IN_HOOKS:
            return "forward", "coalesced"
        passes = internals.ddp_fusion_passes()
        is_concat = _CONCAT in passes and _COALESCED not in passes
        return "hooks", "concat" if is_concat else "coalesced"

    def modules_of_trace(self) -> list[nn.Module]:
        """List the modules among the locals of the function that is being traced."""
        found = internals.first_frame_locals().values()
        return [each for each in found if isinstance(each, nn.Module)]

    def obstacle_to_gathers(self, module: nn.Module) -> str:
        """Prepare gathers of units of ``module`` in the graph; returns an obstacle, or ""."""
        if internals.backend_of_trace() not in ("inductor", _inductor, aot_backend):
            return (
                "the backend runs no pass of ours; inductor and meshwright.compiler.aot_backend do"
            )
        if internals.is_functional_call_traced():
            return "torch.func.functional_call puts tensors in the place of parameters"
        if not self._depth and module not in self.scoped:
            self._install()
        return ""

    def has_written(self) -> bool:
        """Whether the graph that is being traced has written to gathered parameters."""
        return any(version_of(each) for each in internals.values_in_trace(unit_pass.UNSHARD))

    def settings(self) -> Mapping[str, Any]:
        """Inductor's settings for graphs with marks, by name."""
        found = {
            "post_grad_custom_post_pass": self.fuse_pass,
            "joint_custom_pre_pass": self.apart_pass,
        }
        return MappingProxyType(
            {
                **{name: _with_others(name, each) for name, each in found.items()},
                # That reordering would put each wait right after its reduction.
                "reorder_for_peak_memory": False,
            }
        )

    def frame(self, module: nn.Module) -> Callable[..., Any]:
        """Make a function that calls ``module``: `torch.compile` would skip torch's own frame.

        Graphs belong to a code object, with a limit on their number. So modules with equal ``repr``
        share one code object, and others have their own.
        """

        def call(*args: Any, **kwargs: Any) -> object:
            return call_of(module)(*args, **kwargs)

        code = call.__code__
        call.__code__ = self._frames.setdefault(repr(module), code.replace(co_name=code.co_name))
        return call

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Apply the settings in the block."""
        self._depth += 1
        try:
            settings = {**self.settings(), "reorder_for_locality": False}
            with internals.inductor_settings.patch(settings):
                yield
        finally:
            self._depth -= 1

    def ran(self, plan: str) -> None:
        """Set both ``ddp_buckets`` counters for a graph with ``plan`` that runs."""
        _, rows = json.loads(plan)
        self.counters["ddp_buckets"] = internals.counters["inductor"]["ddp_buckets"] = len(rows)

    def is_unfused(self, model: str) -> None:
        """Count a mark reduced alone, and warn once per model."""
        self.counters["unfused"] += 1
        if model not in self._warned:
            self._warned.add(model)
            _log.warning(
                "a compiled graph reduces the gradients of model %s one by one: its backend runs "
                'no pass of ours. Use "inductor", or meshwright.compiler.aot_backend',
                model,
            )

    def _install(self) -> None:
        # Plain torch.compile offers no scope for settings, so they stay set, like torch's own.
        for name, value in self.settings().items():
            setattr(internals.inductor_settings, name, value)


def _with_others(setting: str, own: internals.CustomGraphPass) -> object:
    """The passes of ``setting`` with ``own`` last; ``own`` itself if there are no others."""
    found: object = getattr(internals.inductor_settings, setting)
    others = [] if found is None else list(found) if isinstance(found, list) else [found]
    passes = [*(each for each in others if each is not own), own]
    return passes if len(passes) > 1 else own


MARKING = _Marking()


def compile_module(module: M, *, fullgraph: bool = False, dynamic: bool | None = None) -> M:
    """Compile ``module`` in place, with the gradient reductions inside of its graphs.

    Like ``module.compile()``, but the required settings apply to its graphs alone, and the backward
    recomputes views instead of saving them. Names and state dict do not change. ``fullgraph`` and
    ``dynamic`` are those of `torch.compile`.
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
    """Compile backward passes in the block, with the hooks of replicated modules.

    ``compiler_fn`` compiles the graph of a backward pass; the default is `torch.compile`. Settings
    are restored at the end of the block.

    Raises RuntimeError if torch has no such switch.
    """
    enable = internals.backward_compiler()
    if enable is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot compile backward passes (it has no "
            "torch._dynamo.compiled_autograd._enable): compile the forward alone"
        )
    with MARKING.scope(), enable(compiler_fn or torch.compile, dynamic=dynamic):
        yield


def _inductor(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    # If a view of an activation is saved for a product, its sign is saved separately: one byte per
    # element, which generated CPU code writes eight times slower than a float.
    with internals.functorch_settings.patch(recompute_views=True):
        compiled = internals.compile_graph(graph, inputs, options=dict(MARKING.settings()))
    return cast("Callable[..., Any]", compiled)


def _fuse_and_run(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    _fuse(graph.graph)
    graph.recompile()
    return internals.make_boxed_func(graph.forward)


def _run_alone(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    unit_pass.keep_apart(graph.graph)
    return _fuse_and_run(graph, inputs)


def _cut(graph: fx.GraphModule, inputs: Any, **keywords: Any) -> Any:  # noqa: ANN401 - torch's
    has_units = unit_pass.keep_apart(graph.graph)
    # Recomputation tags need the min-cut partitioner; otherwise save what eager mode saves.
    cut = (
        internals.min_cut_rematerialization_partition if has_units else internals.default_partition
    )
    return cut(graph, inputs, **keywords)


aot_backend = internals.aot_autograd(
    fw_compiler=_fuse_and_run,
    bw_compiler=_fuse_and_run,
    inference_compiler=_run_alone,
    partition_fn=_cut,
)
"""A backend for `torch.compile` that fuses reductions and runs nodes in graph order, without code
generation. For tests, and for models whose code generation fails."""
