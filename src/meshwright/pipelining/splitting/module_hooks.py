"""Hooks of modules that a pipeline does not call as themselves: they would be passed over.

A chain's model, its lists and sequences are taken apart into stages, and tracing takes apart all of
a model. Hooks of torch's own, such as those of ``weight_norm``, compute what is in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.modules import module as of_all_modules

from meshwright.torch_internals.modules import HOOKS, STATE_HOOKS

CALLED: Mapping[str, str] = HOOKS
"""What runs when a module is called, by the attribute that holds it."""
OF_STATE: Mapping[str, str] = STATE_HOOKS
"""What runs when its state is asked for or given."""
_KEPT = ("torch.", "meshwright.pipelining.")
"""Where hooks come from that a graph has, or that only mark it."""


def key_in_trace(module: nn.Module) -> int:
    """Give the key of ``module``, and of what stands for it in a trace.

    Where a module has two names, export runs other objects with the same attributes.
    """
    return id(vars(module))


def hooks_of(module: nn.Module, kinds: Iterable[str] = (*CALLED, *OF_STATE)) -> dict[str, object]:
    """List the first hook of each of ``kinds`` that a user has put on ``module``."""
    found: dict[str, object] = {}
    for kind in kinds:
        for hook in getattr(module, kind).values():
            if _is_users(hook):
                found.setdefault(kind, hook)
    return found


def drop_hooks(module: nn.Module) -> None:
    """Take from ``module`` what users have put on its calls."""
    for kind in CALLED:
        hooks: dict[int, object] = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if _is_users(hook)]:
            del hooks[key]


def hooks_of_all() -> list[str]:
    """List the kinds of hooks that the process has on all modules, in words."""
    known = ((kind, getattr(of_all_modules, f"_global{kind}", {})) for kind in CALLED)
    return [
        f"{CALLED[kind]} of all modules ({_called(hook)})"
        for kind, hooks in known
        for hook in hooks.values()
        if _is_users(hook)
    ]


def refuse_hooks(modules: Iterable[tuple[str, nn.Module]], why: str, *kinds: str) -> None:
    """Raise ValueError, naming module and hook, where any of ``modules`` has hooks of ``kinds``.

    ``why`` completes "these hooks would not run: ".
    """
    problems = [*_named(modules, kinds or (*CALLED, *OF_STATE)), *hooks_of_all()]
    if problems:
        raise ValueError(
            f"these hooks would not run as they do in one process: {'; '.join(problems)}. {why}"
        )


def _named(modules: Iterable[tuple[str, nn.Module]], kinds: Iterable[str]) -> Iterator[str]:
    for name, module in modules:
        for kind, hook in hooks_of(module, kinds).items():
            what = f"module {name!r}" if name else f"the model itself ({type(module).__name__})"
            yield f"the {({**CALLED, **OF_STATE})[kind]} of {what} ({_called(hook)})"


def _is_users(hook: object) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_KEPT)


def _called(hook: object) -> str:
    """Find the name of a hook's function."""
    return getattr(hook, "__qualname__", type(hook).__name__)
