"""Options that a user has taken from another library's module of the same names."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

__all__ = ["own_config", "own_member"]

E = TypeVar("E", bound=Enum)


def own_member(kind: type[E], value: object) -> E:
    """Find the member of ``kind`` that ``value`` is, or is called like in an enum of the same name.

    Raises TypeError for anything else.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__:
        found = kind.__members__.get(value.name)
        if found is not None:
            return found
    names = ", ".join(kind.__members__)
    raise TypeError(f"expected a {kind.__name__} ({names}), found {value!r}")


def own_config(kind: type[Any], value: Any) -> Any:  # noqa: ANN401 - anything may have been given
    """``value`` as a ``kind`` where it is of a dataclass of the same name; as it is otherwise."""
    if isinstance(value, kind) or type(value).__name__ != kind.__name__:
        return value
    return kind(**{field.name: getattr(value, field.name) for field in fields(kind)})
