"""Values that fields of a configuration may hold: types with bounds, checked and put in words.

``toml_source`` reads and writes whole configurations by these rules, one value at a time.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeVar, Union

from meshwright.errors import PlanError
from meshwright.toml_text import Fault, Key, dotted, literal

__all__ = [
    "Above",
    "AtLeast",
    "Inline",
    "Origin",
    "Problem",
    "RejectedError",
    "Through",
    "default_of",
    "expected",
    "fields_of",
    "item_hints",
    "keys_of",
    "marked",
    "members",
    "mismatch",
    "named",
    "nearest",
    "origin_fields",
    "scalar",
    "unmarked",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Marks a number that may not be smaller."""

    limit: float


@dataclass(frozen=True, slots=True)
class Above:
    """Marks a number that must be larger."""

    limit: float


@dataclass(frozen=True, slots=True)
class Inline:
    """Marks a dataclass whose fields stand in the table that holds it, without one of its own."""


@dataclass(frozen=True, slots=True)
class Through:
    """Marks a type that is written as another one, and how to go from one to the other."""

    written: object
    """The type in the text, such as ``Mapping[str, int]``."""
    build: Callable[..., object]
    plain: Callable[..., object]
    check: Callable[..., Iterable[Problem]] | None = None
    """What is wrong with a table as it is written; keys are those of the table."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the key at fault, what is wrong, and other keys that the judgement rests on.

    A problem whose keys could not be read is not reported, because it may vanish with the cause.
    """

    key: Key
    message: str
    involves: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """The places where values of a configuration were given: the name of the text, lines,
    overrides.
    """

    source: str = ""
    lines: Mapping[Key, int] = field(default_factory=dict)
    overrides: Mapping[Key, str] = field(default_factory=dict)
    """The text of the override that gave a key."""

    def place(self, key: Key) -> str:
        """Name the place of the key or else of the table around it, such as ``"line 7: "``, or
        nothing if it is unknown.
        """
        for length in range(len(key), 0, -1):
            known = key[:length]
            if known in self.overrides:
                return f"override '{self.overrides[known]}': "
            if known in self.lines:
                return f"line {self.lines[known]}: "
            # A table that is in no text exists because of an override of a key in it.
            for inner, override in self.overrides.items():
                if inner[:length] == known:
                    return f"override '{override}': "
        return ""

    def line(self, key: Key) -> float:
        """Find the line of the key, to put problems in order; infinite where none is known."""
        place = self.place(key)
        return int(place[5:-2]) if place.startswith("line ") else math.inf

    def error(self, problems: Iterable[Problem], faults: Iterable[Fault] = ()) -> PlanError:
        """Make one error of all problems and faults of syntax, in the order of the text."""
        found = [(float(fault.line), f"line {fault.line}: {fault.message}") for fault in faults]
        found += [(self.line(p.key), self.place(p.key) + p.message) for p in problems]
        return PlanError([text for _, text in sorted(found, key=lambda pair: pair[0])], self.source)


class RejectedError(Exception):
    """A value cannot be read; carries why."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Find the known name most like ``name``; ``None`` if none is similar."""
    lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def default_of(item: Field[object]) -> object:
    """Find the default of a field; ``MISSING`` if it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def fields_of(kind: type) -> Iterator[tuple[Field[object], object]]:
    """List the fields that are keys, with their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        if hints[item.name] is not Origin:
            yield item, hints[item.name]


def unmarked(hint: object) -> object:
    """Strip a type of its marks."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def marked(hint: object, kind: type[T]) -> T | None:
    """Find the mark of one kind on a type, if there is one."""
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def members(hint: object) -> tuple[object, ...]:
    """List the alternatives of a union, with their marks; the type itself if it is not a union."""
    kind = unmarked(hint)
    if typing.get_origin(kind) in (Union, types.UnionType):
        return tuple(m for member in typing.get_args(kind) for m in members(member))
    return (hint,)


def origin_fields(kind: type) -> list[str]:
    """List the fields that are filled with where the values came from."""
    hints = typing.get_type_hints(kind)
    return [item.name for item in fields(kind) if hints[item.name] is Origin]


def keys_of(kind: type) -> dict[str, dict[str, object]]:
    """List the keys of a table and, for those that are tables themselves, the keys in them."""
    found: dict[str, dict[str, object]] = {}
    for item, hint in fields_of(kind):
        inner = unmarked(hint)
        below = keys_of(inner) if isinstance(inner, type) and is_dataclass(inner) else {}
        found |= below if marked(hint, Inline) else {item.name: dict(below)}
    return found


def item_hints(kind: object, count: int) -> list[object] | None:
    """List the types of a tuple's items; ``None`` for another type or another number of items."""
    hints = typing.get_args(kind) if typing.get_origin(kind) is tuple else ()
    if len(hints) == 2 and hints[1] is ...:
        return [hints[0]] * count
    return list(hints) if hints and len(hints) == count else None


def scalar(value: object, hint: object, key: Key) -> object:
    """Find the value if it is of the type (a whole number may stand for a float) and within the
    bounds that the type is marked with, or reject it.
    """
    kind = unmarked(hint)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if _is_huge(value) or (is_number and not _is_within(value, hint)):
        raise RejectedError(mismatch(value, hint, key))
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if type(choice) is type(value) and choice == value:
                return choice
    elif kind is types.NoneType and value is None:
        return None
    elif kind is float and is_number:
        if math.isfinite(value):
            return float(value)
    elif isinstance(kind, type) and issubclass(kind, (StrEnum, Path)) and isinstance(value, str):
        if issubclass(kind, Path) or value in list(kind):
            return kind(value)
    elif type(value) is kind:
        return value
    raise RejectedError(mismatch(value, hint, key))


def _is_huge(value: object) -> bool:
    """Check for a whole number that TOML and tensors have not: of over 64 bits."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _is_within(value: float, hint: object) -> bool:
    at_least, above = marked(hint, AtLeast), marked(hint, Above)
    return not ((at_least and value < at_least.limit) or (above and value <= above.limit))


def mismatch(value: object, hint: object, key: Key) -> Problem:
    """Describe the problem of a value that is not of the type."""
    shown = "null" if value is None else literal(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = f"{named(key)}: expected {expected(hint)}, found {_what(value)}{shown}"
    choices = [c for member in members(hint) for c in _choices(unmarked(member))]
    close = nearest(value, choices) if isinstance(value, str) else None
    return Problem(key, message + (f"; did you mean {literal(close)}?" if close else ""))


def _what(value: object) -> str:
    """Name the kind of a value, where its literal alone is not clear to a reader."""
    match value:
        case int() if _is_huge(value):
            return "a number of more than 64 bits, "
        case Mapping():
            return "the table "
        case list() | tuple():
            return "the list "
        case str():
            return "the text "
    return ""


def _choices(kind: object) -> list[str]:
    if typing.get_origin(kind) is Literal:
        return [choice for choice in typing.get_args(kind) if isinstance(choice, str)]
    return [str(c) for c in kind] if isinstance(kind, type) and issubclass(kind, StrEnum) else []


_NOUNS: Mapping[object, tuple[str, str]] = types.MappingProxyType(
    {
        bool: ("true or false", "booleans"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        str: ("text", "texts"),
        Path: ("a path", "paths"),
    }
)


def expected(hint: object) -> str:
    """Write a type in words, such as ``"auto" or a list of texts``."""
    words: list[str] = []
    for member in members(hint):
        kind = unmarked(member)
        arguments, origin = typing.get_args(kind), typing.get_origin(kind)
        if origin is Literal:
            words += [literal(choice) for choice in arguments]
        elif choices := _choices(kind):
            words += [literal(choice) for choice in choices]
        elif origin is tuple and arguments[-1] is ...:
            words.append(f"a list of {_plural(arguments[0])}")
        elif origin is tuple:
            words.append(f"a list of {len(arguments)}: {', '.join(map(expected, arguments))}")
        elif origin in (Mapping, dict):
            words.append(f"a table of {_plural(arguments[1])}")
        elif kind is not types.NoneType:
            noun = _NOUNS[kind][0] if kind in _NOUNS else "a table"
            at_least, above = marked(member, AtLeast), marked(member, Above)
            noun += f" of at least {at_least.limit}" if at_least else ""
            words.append(noun + (f" above {above.limit}" if above else ""))
    words = words or ["null"]
    return ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]


def _plural(hint: object) -> str:
    kind = unmarked(hint)
    return _NOUNS[kind][1] if kind in _NOUNS else f"values, each {expected(hint)}"


def named(key: Key) -> str:
    """Write a key as messages call it, such as ``key 'seed' in [train]``."""
    if not key:
        return "the text"
    table = f" in [{dotted(key[:-1])}]" if len(key) > 1 else ""
    return f"key '{key[-1]}'{table}"
