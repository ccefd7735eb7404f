"""Where a model is split: by a marker in its forward, by torch's wrappers, or by names.

The marker is an operator without effect that shows up in a traced graph. Graphs that were traced
elsewhere may have torch's marker, which is recognized by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect
from torch.utils.hooks import RemovableHandle

from meshwright.pipelining.splitting.dropped import refuse_hooks
from meshwright.torch_internals.modules import HOOKS

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]
"""A function that puts split markers into a traced graph."""
_TORCHS_MARKER = "pippy._pipe_split.default"


class SplitPoint(Enum):
    """The side of a module on which the model is split."""

    BEGINNING = 1
    END = 2


@torch.library.custom_op("meshwright::pipe_split", mutates_args=())
def _pipe_split() -> None:
    """The marker in eager mode: does nothing."""


@_pipe_split.register_fake
def _() -> None:
    """The marker in a trace: does nothing."""


_MARKER = torch.ops.meshwright.pipe_split.default
has_side_effect(_MARKER)


def pipe_split() -> None:
    """Split the model here: what follows is the next stage. No effect outside of tracing."""
    _MARKER()


def is_marker(node: fx.Node) -> bool:
    """Whether ``node`` is a split marker, ours or torch's."""
    return node.op == "call_function" and (
        node.target is _MARKER or str(node.target) == _TORCHS_MARKER
    )


def put_marker(graph: fx.Graph, before: fx.Node) -> None:
    """Insert a split marker into ``graph`` in front of ``before``."""
    with graph.inserting_before(before):
        graph.call_function(_MARKER)


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Put hooks on modules of ``mod``, by name, that mark a split in every later trace.

    Raises ``AttributeError`` for a name that is no module, ``ValueError`` for another kind of
    split point; then no hook is registered.
    """
    _attach(mod, spec, {})


@contextmanager
def marked(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Apply `annotate_split_points` for the duration of the block.

    Raises ``ValueError`` for modules that the block did not call: they would split nothing.
    """
    calls = dict.fromkeys(spec, 0)
    handles = _attach(mod, spec, calls)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name, count in calls.items() if not count]
    if idle:
        raise ValueError(
            f"split_spec names {idle}, which the model does not call with these arguments: name "
            "modules whose forward runs, or use pipe_split() in the model's forward"
        )


def _attach(
    mod: nn.Module, spec: Mapping[str, SplitPoint], calls: dict[str, int]
) -> list[RemovableHandle]:
    parts = {name: _named(mod, name) for name in spec}
    for name, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"Unknown split point type. Expected SplitPoint.BEGINNING or SplitPoint.END for "
                f"{name!r}, found {point!r}"
            )

    def marking(name: str) -> Callable[..., None]:
        def mark(*_: object) -> None:
            calls[name] = calls.get(name, 0) + 1
            pipe_split()

        return mark

    return [
        parts[name].register_forward_pre_hook(marking(name), prepend=True)
        if point is SplitPoint.BEGINNING
        else parts[name].register_forward_hook(marking(name))
        for name, point in spec.items()
    ]


def _named(mod: nn.Module, name: str) -> nn.Module:
    found = mod
    for part in name.split("."):
        child = getattr(found, part, None)
        if not isinstance(child, nn.Module):
            raise AttributeError(
                f"Specified target {name} referenced nonexistent module {part}: "
                f"{type(found).__name__} has the modules {list(dict(found.named_children()))}"
            )
        found = child
    return found


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` that is split between all of its modules."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """Make one of the modules of ``sequential_instance``."""
        return PipeSequential(*(module for module in sequential_instance))

    def forward(self, input: Any) -> Any:  # noqa: ANN401
        """Run the modules in turn."""
        for number, module in enumerate(self):
            if number:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model and its loss as one module. A subclass must define ``forward``."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Raise ``NotImplementedError``: how model and loss go together is up to the subclass."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: override it to call self.module and "
            "self.loss_fn and return the loss, or use TrivialLossWrapper"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    # pyrefly: ignore[bad-override]
    def forward(self, x: Any, targets: Any) -> Any:  # noqa: ANN401
        """Compute the loss of one microbatch."""
        return self.loss_fn(self.module(x), targets)


class _Named(nn.Module):
    """Some modules of a model, called in turn, under their names in the model."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(leaf, model.get_submodule(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call each module with the previous one's output."""
        first, *rest = (self.get_submodule(name) for name in self._names)
        value = first(*args, **kwargs)
        for module in rest:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


def stages_by_name(model: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Make modules for `PipelineStage` without tracing: one for each list of names in ``model``.

    The model must be a chain: its forward calls the named modules in this order, and each with the
    outputs of the previous one. Parameters stay those of the model, with its names.

    Raises ``AttributeError`` for a name that is no module; ``ValueError`` when a stage has none, a
    module or one within it is named twice, parameters of the model belong to no stage, or modules
    that no stage calls have hooks.
    """
    listed = [name for stage in names for name in stage]
    if not all(names):
        raise ValueError(f"stage {[bool(stage) for stage in names].index(False)} has no modules")
    for number, name in enumerate(listed):
        for other in listed[:number]:
            if name == other or f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}."):
                raise ValueError(f"module {name!r} is named twice (within {other!r})")
    stages: list[nn.Module] = [_Named(model, stage) for stage in names]
    inside = {part for stage in stages for part in stage.modules()}
    refuse_hooks(
        ((name, part) for name, part in model.named_modules() if part not in inside),
        "Only the modules that are named are called: name those that have hooks",
        *HOOKS,
    )
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"the parameters {missing} of the model belong to no stage: name their modules as well"
        )
    return stages
