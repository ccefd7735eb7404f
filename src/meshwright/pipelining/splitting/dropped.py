"""The parts of a module that the graph of its forward lacks: kept, detected, or rejected.

A graph has operators and nothing else. Hooks that the model puts on tensors, the backward of an
`autograd.Function` and hooks on saved tensors would be dropped silently, and with them a part of
the gradient. So would hooks of modules that are split into stages; torch's own, such as
``weight_norm``'s, are part of the graph.

A graph keeps only what it writes to buffers of its root module, so values that the forward assigns
to buffers of other modules are copied into them at its end. Tensors in plain attributes stay as
they were in the trace: a forward that reads and writes one is rejected.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from meshwright.comm.dtensors.subclasses import has_calls
from meshwright.torch_internals.autograd import function_class, saved_tensor_hooks
from meshwright.torch_internals.modules import HOOKS, HOOKS_OF_ALL, STATE_HOOKS
from meshwright.torch_internals.tracing import GRAPH_OPERATORS
from meshwright.torch_internals.trees import tree_leaves

HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Methods that register something on a tensor for its backward."""
_TORCH = str(Path(torch.__file__).parent)
_INSTEAD = (
    "Leave it out, let the model be a chain of modules that do it inside (its forward calls one "
    "after the other and nothing else), or give modules of your own to PipelineStage"
)


@contextlib.contextmanager
def watched_forward(model: nn.Module) -> Iterator[None]:
    """Watch a forward of ``model``: raise ValueError after the block for what a graph drops."""
    watch = _Watch(model)
    handle = model.register_forward_hook(watch.look)
    try:
        # Functions are found in the autograd graph, so one is needed even under no_grad.
        with watch, torch.enable_grad():
            yield
    finally:
        handle.remove()
    if watch.found:
        raise ValueError(
            "a traced stage is a graph of operators, which would drop the model's other "
            f"effects: {'; '.join(watch.found)}. {_INSTEAD}"
        )


def refuse_subclasses(model: nn.Module) -> None:
    """Raise ValueError for a parameter or buffer whose class overrides torch's calls."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_calls(tensor):
            raise ValueError(
                "a traced stage is a graph of operators on plain tensors, which would drop what "
                f"{name!r}, a {type(tensor).__name__}, does in calls of its own. {_INSTEAD}"
            )


def _recomputes() -> bool:
    """Whether a reentrant checkpoint is running; under no_grad only the stack shows it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


class _Watch(TorchFunctionMode):
    """Inspects all functions that a forward calls, and the autograd graph of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {key_in_trace(part): name for name, part in model.named_modules()}
        self._before = saved_tensor_hooks()
        self.found: dict[str, None] = {}
        """Descriptions of what was found, in order."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Note what a graph would drop, and call the function."""
        name = getattr(func, "__name__", "")
        if not torch.is_grad_enabled() and _recomputes():
            self.found[
                f"reentrant torch.utils.checkpoint {self._place()}, whose backward is none of its "
                "operators': pass use_reentrant=False, where it lies inside of a module of a chain"
            ] = None
        if name in HOOKING:
            self.found[f"Tensor.{name} {self._place()}"] = None
        elif saved_tensor_hooks() is not self._before and (place := self._place()):
            self.found[
                f"torch.utils.checkpoint or saved_tensors_hooks {place}, where a graph keeps all "
                "activations"
            ] = None
        return func(*args, **(kwargs or {}))

    def look(self, module: nn.Module, args: object, output: object) -> None:
        """Forward hook of the model: notes the user's `autograd.Function`s in the output's graph.

        Raises TypeError for an output in which a trace finds no tensors.
        """
        for leaf in tree_leaves(output):
            if is_dataclass(leaf):
                name = type(leaf).__qualname__
                raise TypeError(
                    f"the model returns the dataclass {name}, in which a trace finds no tensors: "
                    f'call torch.export.register_dataclass({name}, serialized_type_name="{name}") '
                    "before"
                )
        stack: list[Any] = [
            leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
        ]
        seen: set[object] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                function = function_class(node)
                is_noted = function is CheckpointFunction
                if not is_noted and not function.__module__.startswith(GRAPH_OPERATORS):
                    self.found[
                        f"the backward of {function.__module__}.{function.__qualname__}, an "
                        "autograd.Function (torch.library.custom_op with register_autograd makes "
                        "an operator of it)"
                    ] = None
            stack.extend(following for following, _ in node.next_functions)

    def _place(self) -> str:
        """The innermost running module of the user, and its line; empty without one."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            name = self._names.get(key_in_trace(owner)) if isinstance(owner, nn.Module) else None
            if name is not None and not code.co_filename.startswith(_TORCH):
                where = f"module {name!r}" if name else "the model"
                return f"in {where} ({code.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
        return ""


_KEPT = ("torch.", "meshwright.pipelining.")
"""Packages whose hooks are part of the graph, or only mark it."""


def key_in_trace(module: nn.Module) -> int:
    """A key for ``module`` and for its stand-ins in a trace.

    Where a module has two names, export runs other objects that share its ``__dict__``.
    """
    return id(vars(module))


def hooks_of(module: nn.Module, kinds: Iterable[str] = (*HOOKS, *STATE_HOOKS)) -> dict[str, object]:
    """Map each of ``kinds`` to the first hook of it that a user has put on ``module``."""
    found: dict[str, object] = {}
    for kind in kinds:
        for hook in getattr(module, kind).values():
            if _is_users(hook):
                found.setdefault(kind, hook)
    return found


def drop_hooks(module: nn.Module) -> None:
    """Remove the call hooks that users have put on ``module``."""
    for kind in HOOKS:
        hooks: dict[int, object] = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if _is_users(hook)]:
            del hooks[key]


def hooks_of_all() -> list[str]:
    """Describe the hooks that users have registered for all modules of the process."""
    return [
        f"{HOOKS[kind]} of all modules ({_called(hook)})"
        for kind, hooks in HOOKS_OF_ALL.items()
        for hook in hooks.values()
        if _is_users(hook)
    ]


def refuse_hooks(modules: Iterable[tuple[str, nn.Module]], why: str, *kinds: str) -> None:
    """Raise ValueError, naming module and hook, where any of ``modules`` has hooks of ``kinds``.

    Hooks for all modules of the process count, too. ``why`` ends the message, as a sentence.
    """
    problems = [*_named(modules, kinds or (*HOOKS, *STATE_HOOKS)), *hooks_of_all()]
    if problems:
        raise ValueError(
            f"these hooks would not run as they do in one process: {'; '.join(problems)}. {why}"
        )


def _named(modules: Iterable[tuple[str, nn.Module]], kinds: Iterable[str]) -> Iterator[str]:
    for name, module in modules:
        for kind, hook in hooks_of(module, kinds).items():
            what = f"module {name!r}" if name else f"the model itself ({type(module).__name__})"
            yield f"the {({**HOOKS, **STATE_HOOKS})[kind]} of {what} ({_called(hook)})"


def _is_users(hook: object) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_KEPT)


def _called(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


@contextlib.contextmanager
def assignments(model: nn.Module) -> Iterator[set[str]]:
    """Make the forward of ``model`` copy what it assigns to buffers of inner modules into them.

    Yields a set that receives the names of attributes whose tensor the forward has replaced.
    Raises ValueError after the block for another shape or dtype than a buffer has.
    """
    names = {part: f"{name}." for name, part in model.named_modules() if part is not model}
    names[model] = ""
    parts = {key_in_trace(part): part for part in names}
    held: dict[tuple[nn.Module, str], tuple[torch.Tensor, torch.Tensor]] = {}
    wrong: dict[str, None] = {}
    before: dict[nn.Module, dict[str, Any]] = {}
    replaced: set[str] = set()

    def begin(*_: object) -> None:
        held.clear()
        before.update((part, dict(vars(part))) for part in names)

    def note(part: nn.Module, key: str, value: Any) -> None:  # noqa: ANN401
        buffer, own = part._buffers.get(key), parts.get(key_in_trace(part))
        if own is None or own is model or buffer is None or value is None:
            return
        part = own
        buffer, _ = held.get((part, key), (buffer, None))
        if buffer.shape != value.shape or buffer.dtype != value.dtype:
            wrong[
                f"{names[part]}{key} had shape {tuple(buffer.shape)} and {buffer.dtype}, and "
                f"forward gives it {tuple(value.shape)} and {value.dtype}"
            ] = None
            return
        # Detach where it is assigned: the node then belongs to the stage that computes it.
        held[part, key] = buffer, value.detach() if value.requires_grad else value

    def end(*_: object) -> None:
        for (part, key), (buffer, value) in held.items():
            buffer.copy_(value)
            part._buffers[key] = buffer
        for part, had in before.items():
            now = vars(part)
            replaced.update(
                f"{names[part]}{key}"
                for key, value in had.items()
                if isinstance(value, torch.Tensor) and now.get(key) is not value
            )

    handles = [
        register_module_buffer_registration_hook(note),
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end),
    ]
    try:
        yield replaced
    finally:
        for handle in handles:
            handle.remove()
    if wrong:
        raise ValueError(
            f"a traced stage keeps the sizes of buffers, but {'; '.join(wrong)}. Register it with "
            "the shape and dtype that forward gives it"
        )


def refuse_remembered(replaced: Iterable[str], constants: Collection[str]) -> None:
    """Raise ValueError for attributes that were ``replaced``, where a graph reads the old one."""
    found = sorted({*replaced} & {*constants})
    if found:
        raise ValueError(
            f"each forward reads the tensor {found[0]!r} and gives the attribute another one, but "
            "in a traced stage it would stay as it was: register it as a buffer"
        )
