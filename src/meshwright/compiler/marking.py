"""Marked gradients under `torch.compile`: the pass, its settings, the routes of marks."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import Any
from weakref import WeakSet

from torch import fx, nn

from meshwright.compiler import bucket_pass, bucket_plan, guarantees
from meshwright.torch_internals import compile as internals
from meshwright.torch_internals.modules import call_of

__all__ = ["MARKING", "fuse"]

_log = logging.getLogger("meshwright")

_IN_HOOKS = ("python_reducer", "python_reducer_without_compiled_forward")
"""Torch's names for a backward pass whose hooks reduce."""

_CONCAT = "fuse_ddp_with_concat_op"
_COALESCED = "fuse_ddp_with_coalesced_op"


def fuse(graph: fx.Graph) -> None:
    """Fuse the marks of ``graph``, if it has any, and check what came of it."""
    if not bucket_plan.marks_of(graph):
        return
    before = guarantees.peak_bytes(graph)
    plans = bucket_pass.fuse_marks(graph)
    guarantees.check_buckets(graph, plans, before)
    MARKING.counters["passes"] += 1
    MARKING.counters["bytes"] += sum(plan.bytes for plan in plans)


class _FusePass(internals.CustomGraphPass):
    """`fuse`, as inductor calls it. All that it depends on stands in the graph."""

    def __call__(self, graph: fx.Graph) -> None:
        fuse(graph)

    def uuid(self) -> str:
        """Equal for equal versions of the pass: compiled graphs are cached under it."""
        return "".join(inspect.getsource(part) for part in (bucket_plan, bucket_pass, guarantees))


class _Marking:
    """The `GradientMarking` of `torch.compile`. There is one, `MARKING`."""

    def __init__(self) -> None:
        self.fuse_pass = _FusePass()
        self.scoped: WeakSet[nn.Module] = WeakSet()
        """Modules whose compilation brings its settings itself."""
        self.counters: Counter[str] = Counter()
        """``ddp_buckets``: of the graph that ran last. ``passes``: graphs whose marks were fused.
        ``bytes``: of all fused buckets. ``unfused``: marks that were reduced alone, because the
        backend does not run the pass."""
        self._frames: dict[str, CodeType] = {}
        self._depth = 0
        self._warned: set[str] = set()

    def route(self, module: nn.Module | None) -> tuple[str, str]:
        """Choose the route of the marks of ``module``, and the way buckets are sent, as torch's
        settings say.
        """
        if not self._depth and module not in self.scoped:
            self._install()
        if internals.dynamo_settings.optimize_ddp not in _IN_HOOKS:
            return "forward", "coalesced"
        passes = internals.ddp_fusion_passes()
        is_concat = _CONCAT in passes and _COALESCED not in passes
        return "hooks", "concat" if is_concat else "coalesced"

    def settings(self) -> Mapping[str, Any]:
        """Inductor's settings while it compiles a graph with marks, by their names."""
        found: object = internals.inductor_settings.post_grad_custom_post_pass
        others = [] if found is None else list(found) if isinstance(found, list) else [found]
        passes = [*(each for each in others if each is not self.fuse_pass), self.fuse_pass]
        return MappingProxyType(
            {
                "post_grad_custom_post_pass": passes if len(passes) > 1 else self.fuse_pass,
                # It would put each wait right behind its reduction.
                "reorder_for_peak_memory": False,
            }
        )

    def frame(self, module: nn.Module) -> Callable[..., Any]:
        """Make a call of ``module`` in a frame that `torch.compile` takes, which torch's own are
        not.

        Graphs belong to the code of a frame, and there are only so many to one. Modules of equal
        build share theirs, others do not.
        """

        def call(*args: Any, **kwargs: Any) -> object:
            return call_of(module)(*args, **kwargs)

        code = call.__code__
        call.__code__ = self._frames.setdefault(repr(module), code.replace(co_name=code.co_name))
        return call

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The settings hold inside of the block."""
        self._depth += 1
        try:
            settings = {**self.settings(), "reorder_for_locality": False}
            with internals.inductor_settings.patch(settings):
                yield
        finally:
            self._depth -= 1

    def ran(self, plan: str) -> None:
        """A graph with ``plan`` runs: tell both counters."""
        _, rows = json.loads(plan)
        self.counters["ddp_buckets"] = internals.counters["inductor"]["ddp_buckets"] = len(rows)

    def is_unfused(self, model: str) -> None:
        """Say once for each model that its backend reduces gradient by gradient."""
        self.counters["unfused"] += 1
        if model not in self._warned:
            self._warned.add(model)
            _log.warning(
                "a compiled graph reduces the gradients of model %s one by one: its backend runs "
                'no pass of ours. Use "inductor", or meshwright.compiler.aot_backend',
                model,
            )

    def _install(self) -> None:
        # Plain torch.compile has no place to scope settings to; they stay, as torch's own do.
        for name, value in self.settings().items():
            setattr(internals.inductor_settings, name, value)


MARKING = _Marking()
