"""Patches of methods of other libraries' classes, which can be undone.

Our function gets the original method, then the arguments of the call. Each patch lists the
argument names that it expects of the method, since another version may have others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Changes = Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]
"""By the name of a method: its expected arguments, and the function called in its place."""

_BEFORE = "_before_meshwright"
"""The attribute of a patched method that holds the original."""


def change(*all_changes: tuple[type, Changes]) -> None:
    """Patch methods of classes. A second call does nothing.

    Raises RuntimeError, and changes nothing, if a method takes other arguments.
    """
    for cls, changes in all_changes:
        for name, (known, _) in changes.items():
            found = _arguments_of(cls, name)
            if found != known:
                raise RuntimeError(
                    f"{cls.__name__}.{name} takes {found} in this version of "
                    f"{cls.__module__.partition('.')[0]}, and meshwright knows it with {known}: "
                    "see docs/clients.md for the versions that were run"
                )
    for cls, changes in all_changes:
        for name, (_, ask) in changes.items():
            if not hasattr(getattr(cls, name), _BEFORE):
                setattr(cls, name, _changed(vars(cls)[name], ask))


def fits(cls: type, changes: Changes) -> bool:
    """Check whether the methods of ``cls`` take the expected arguments."""
    return all(_arguments_of(cls, name) == known for name, (known, _) in changes.items())


def _arguments_of(cls: type, name: str) -> tuple[str, ...] | None:
    method = getattr(cls, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)


def put_back(*all_changes: tuple[type, Changes]) -> None:
    """Restore the methods that `change` patched. Does nothing without it."""
    for cls, changes in all_changes:
        for name in changes:
            before = getattr(getattr(cls, name), _BEFORE, None)
            if before is not None:
                setattr(cls, name, before)


def _changed(before: Any, ask: Callable[..., Any]) -> Any:  # noqa: ANN401 - methods
    """Make the method that calls ``ask`` with the original, ``before``."""
    function = before.__func__ if isinstance(before, staticmethod) else before

    @functools.wraps(function)
    def ours(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - theirs
        if function is not before:
            return ask(function, *args, **kwargs)
        return ask(functools.partial(function, args[0]), *args, **kwargs)

    setattr(ours, _BEFORE, before)
    return ours if function is before else staticmethod(ours)
