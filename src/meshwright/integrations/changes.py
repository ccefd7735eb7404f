"""Methods of a class of another program that ask functions of ours, until they are put back.

A function of ours gets the method as it was, then what the method was called with. Each is given
with the names of the arguments that the method is known to take: another version may have others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Changes = Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]
"""By a method's name, its arguments and what is asked in its place."""

_BEFORE = "_before_meshwright"
"""The attribute of a changed method that holds the one before."""


def change(*all_changes: tuple[type, Changes]) -> None:
    """Change methods of classes; nothing the second time.

    Raises RuntimeError, and changes nothing, where a method takes other arguments.
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
    """Tell whether the methods of ``cls`` take the arguments that are known."""
    return all(_arguments_of(cls, name) == known for name, (known, _) in changes.items())


def _arguments_of(cls: type, name: str) -> tuple[str, ...] | None:
    method = getattr(cls, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)


def put_back(*all_changes: tuple[type, Changes]) -> None:
    """Give classes back the methods that `change` has changed. Nothing without it."""
    for cls, changes in all_changes:
        for name in changes:
            before = getattr(getattr(cls, name), _BEFORE, None)
            if before is not None:
                setattr(cls, name, before)


def _changed(before: Any, ask: Callable[..., Any]) -> Any:  # noqa: ANN401 - methods
    """Make the method that calls ``ask`` with the one ``before``."""
    function = before.__func__ if isinstance(before, staticmethod) else before

    @functools.wraps(function)
    def ours(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - theirs
        if function is not before:
            return ask(function, *args, **kwargs)
        return ask(functools.partial(function, args[0]), *args, **kwargs)

    setattr(ours, _BEFORE, before)
    return ours if function is before else staticmethod(ours)
