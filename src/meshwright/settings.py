"""Annotations on the fields of a configuration, its problems, and the origin of its values.

``toml_source`` uses them to read and write whole configurations. Methods called
``__get_pydantic_core_schema__`` are called by pydantic, which this file does not import.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Annotated, TypeVar

from meshwright.errors import PlanError

Key = tuple[str, ...]
"""The path of a key from the root, such as ``("train", "seed")``."""
T = TypeVar("T")
Schema = Callable[[object], dict[str, object]]
"""Makes pydantic's core schema of a type."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Annotates a number with its least allowed value."""

    limit: float

    def __get_pydantic_core_schema__(self, kind: object, schema: Schema) -> dict[str, object]:
        return {**schema(kind), "ge": self.limit}


@dataclass(frozen=True, slots=True)
class Above:
    """Annotates a number that must be larger than a bound."""

    limit: float

    def __get_pydantic_core_schema__(self, kind: object, schema: Schema) -> dict[str, object]:
        return {**schema(kind), "gt": self.limit}


@dataclass(frozen=True, slots=True)
class Inline:
    """Annotates a dataclass whose fields are keys of the enclosing table instead of its own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake: the key at fault, what is wrong, and the other keys that it depends on.

    It is not reported if one of these keys could not be read: it may be a consequence.
    """

    key: Key
    message: str
    involves: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values came from: the name of the text, lines, overrides."""

    source: str = ""
    lines: Mapping[Key, int] = field(default_factory=dict)
    overrides: Mapping[Key, str] = field(default_factory=dict)
    """The text of the override that gave a key."""

    def place(self, key: Key) -> str:
        """Name the place of the key or of the table around it, such as ``"line 7: "``, if known."""
        for length in range(len(key), 0, -1):
            known = key[:length]
            if known in self.overrides:
                return f"override '{self.overrides[known]}': "
            if known in self.lines:
                return f"line {self.lines[known]}: "
            # A table that is not in the text exists because an override sets a key in it.
            for inner, override in self.overrides.items():
                if inner[:length] == known:
                    return f"override '{override}': "
        return ""

    def error(self, problems: Iterable[Problem]) -> PlanError:
        """Make one error for all problems, in the order of the text."""
        found: list[tuple[float, str]] = []
        for problem in problems:
            place = self.place(problem.key)
            line = int(place[5:-2]) if place.startswith("line ") else math.inf  # "line 7: "
            found.append((line, place + problem.message))
        return PlanError([text for _, text in sorted(found, key=lambda pair: pair[0])], self.source)


_OVERRIDE = re.compile(r"[\w-]+(\.[^=\s/]+)+=")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into overrides, as ``table.key=value``, and the others.

    An override is ``table.key=value``, ``--table.key=value``, or ``--table.key`` and the value as
    the next word; with no value after it, it is a switch: ``--model.tied``.
    """
    overrides: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            (overrides if _OVERRIDE.match(word) else rest).append(word)
            continue
        if "." not in name:
            rest.append(word)
            continue
        if not equals:
            value = queue.pop(0) if queue and not queue[0].startswith("--") else "true"
        overrides.append(f"{name.replace('-', '_')}={value}")
    return overrides, rest


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Find the known name most similar to ``name``; ``None`` if none is."""
    lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def fields_of(kind: type) -> Iterator[tuple[Field[object], object]]:
    """List the fields that are keys, with their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        if hints[item.name] is not Origin:
            yield item, hints[item.name]


def unmarked(hint: object) -> object:
    """Strip a type of its annotations."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def marked(hint: object, kind: type[T]) -> T | None:
    """Return the annotation of one kind on a type, if there is one."""
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def keys_of(kind: type) -> dict[str, dict[str, object]]:
    """List the keys of a table and, for those that are tables themselves, the keys in them."""
    found: dict[str, dict[str, object]] = {}
    for item, hint in fields_of(kind):
        inner = unmarked(hint)
        below = keys_of(inner) if isinstance(inner, type) and is_dataclass(inner) else {}
        found |= below if marked(hint, Inline) else {item.name: dict(below)}
    return found
