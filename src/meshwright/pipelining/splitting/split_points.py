"""The marker of a cut between stages: it leaves a trace in the graph, and has no effect.

The marker is an operator of our own library. Graphs that were traced elsewhere may have torch's; it
is known by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect
from torch.utils.hooks import RemovableHandle

_TORCHS_MARKER = "pippy._pipe_split.default"


class SplitPoint(Enum):
    """On which side of a module the cut is."""

    BEGINNING = 1
    END = 2


@torch.library.custom_op("meshwright::pipe_split", mutates_args=())
def _pipe_split() -> None:
    """The marker, in eager."""


@_pipe_split.register_fake
def _() -> None:
    """The marker, while a graph is traced."""


_MARKER = torch.ops.meshwright.pipe_split.default
has_side_effect(_MARKER)


def pipe_split() -> None:
    """Cut the model here: what follows belongs to the next stage. No effect outside of tracing."""
    _MARKER()


def is_marker(node: fx.Node) -> bool:
    """Check that ``node`` cuts the graph."""
    return node.op == "call_function" and (
        node.target is _MARKER or str(node.target) == _TORCHS_MARKER
    )


def put_marker(graph: fx.Graph, before: fx.Node) -> None:
    """Cut ``graph`` in front of ``before``."""
    with graph.inserting_before(before):
        graph.call_function(_MARKER)


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Make modules of ``mod``, by name, mark a cut whenever they are called, from now on.

    Raises ``AttributeError`` for a name that is no module, ``ValueError`` for another kind of
    split point; then nothing is changed.
    """
    _attach(mod, spec, {})


@contextmanager
def marked(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """`annotate_split_points`, until the end of the block.

    Raises ``ValueError`` for modules that the block did not call: they cut nothing.
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
    found = [(name, _named(mod, name), point) for name, point in spec.items()]
    for name, _, point in found:
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"Unknown split point type. Expected SplitPoint.BEGINNING or SplitPoint.END for "
                f"{name!r}, found {point!r}"
            )
    handles: list[RemovableHandle] = []
    for name, module, point in found:
        handles.append(_hooked(module, name, point, calls))
    return handles


def _hooked(
    module: nn.Module, name: str, point: SplitPoint, calls: dict[str, int]
) -> RemovableHandle:
    def mark(*_: object) -> None:
        calls[name] = calls.get(name, 0) + 1
        pipe_split()

    if point is SplitPoint.BEGINNING:
        return module.register_forward_pre_hook(mark, prepend=True)
    return module.register_forward_hook(mark)


def _named(mod: nn.Module, name: str) -> nn.Module:
    """Find the module called ``name``."""
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
