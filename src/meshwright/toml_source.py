"""TOML text to nested frozen dataclasses and back, with every mistake reported at once.

A configuration is a frozen dataclass: its fields are keys, its nested dataclasses are tables.

::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class RunConfig:
        steps: Annotated[int, AtLeast(1)] = 300
        resume: Literal["auto", "never"] = "auto"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class TrainConfig:
        plan: Annotated[Plan, Inline()] = Plan()     # the plan's tables stand beside [run]
        run: RunConfig = RunConfig()

        def problems(self) -> list[Problem]: ...     # optional: rules between several keys

    config = read(text, TrainConfig, source="train.toml", overrides=["run.steps=20"])
    text = dump(config)                              # read(dump(config), TrainConfig) == config

Types of fields: ``bool int float str Path``, ``Literal``, ``StrEnum``, ``tuple[X, ...]`` and
``tuple[X, Y]``, ``Mapping[str, X]``, ``Any``, dataclasses, unions of these, and ``X | None``
(absent in TOML, ``null`` in JSON). Numbers are finite. A field of type ``Origin`` is no key:
``read`` fills it in, so that checks that run later still name lines. An override is ``key=value``,
``--key=value``, or ``--key`` and the value as the next word; the value as in TOML or else bare text
(``none`` empties a field that may be ``None``); it wins over the text.
"""

from __future__ import annotations

import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from meshwright.errors import PlanError
from meshwright.settings import (
    Above,
    AtLeast,
    Inline,
    Origin,
    Problem,
    Through,
    fields_of,
    keys_of,
    marked,
    nearest,
    split_overrides,
    unmarked,
)
from meshwright.toml_text import Key, dotted, literal, parse, parse_key, write

T = TypeVar("T")


class _RejectedError(Exception):
    """Signals that a value cannot be read; carries the problems."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems


def read(text: str, kind: type[T], *, source: str = "", overrides: Sequence[str] = ()) -> T:
    """Read TOML text as a ``kind``. ``source`` names the text in messages.

    Raises one ``PlanError`` with all mistakes of syntax, unknown keys, wrong types and values.
    """
    document = parse(text)
    given: dict[Key, str] = {}
    problems: list[Problem] = []
    joined, others = split_overrides(overrides)
    for override in [*joined, *others]:
        problems += _apply(document.tree, override, given)
    origin = Origin(source, document.lines, given)
    result, found = _Reader(origin, kind).read(document.tree)
    if document.faults or problems or found:
        raise origin.error([*problems, *found], document.faults)
    return cast(T, result)


def read_file(path: str | Path, kind: type[T], *, overrides: Sequence[str] = ()) -> T:
    """Read a TOML file as a ``kind``; the path names it in messages."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"expected a TOML file, but it cannot be read: {reason}", str(path)
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PlanError(
            f"line {line}: expected text in UTF-8, found another byte", str(path)
        ) from error
    return read(text, kind, source=str(path), overrides=overrides)


def read_tree(tree: Mapping[str, object], kind: type[T], *, origin: Origin | None = None) -> T:
    """Read what ``plain`` gave, for example after a round through JSON, as a ``kind``."""
    origin = origin or Origin()
    result, problems = _Reader(origin, kind).read(tree)
    if problems:
        raise origin.error(problems)
    return cast(T, result)


def review(record: object, origin: Origin) -> list[Problem]:
    """List the problems of a configuration built in code, by the rules of ``read``."""
    return _Reader(origin, type(record)).read(cast(Mapping[str, object], plain(record)))[1]


def plain(record: object) -> object:
    """Convert a configuration to nested dictionaries, lists and scalars, every key included."""
    if isinstance(record, Mapping):
        return {str(key): plain(inner) for key, inner in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(inner) for inner in record]
    if not is_dataclass(record):
        return str(record) if isinstance(record, (StrEnum, Path)) else record
    tree: dict[str, object] = {}
    for item, hint in fields_of(type(record)):
        value = getattr(record, item.name)
        if through := marked(hint, Through):
            value = through.plain(value)
        inner = plain(value)
        is_inline = marked(hint, Inline) and isinstance(inner, dict)
        tree |= inner if is_inline else {item.name: inner}
    return tree


def dump(record: object, *, every_key: bool = False) -> str:
    """Write a configuration as TOML text: what differs from the defaults, or every key.

    Raises ``ValueError`` for a ``None`` where the default is another value: TOML has no null.
    """
    return write(_differing(record, every_key))


def _differing(record: object, every_key: bool) -> dict[str, object]:
    tree: dict[str, object] = {}
    for item, hint in fields_of(type(record)):
        value, default = getattr(record, item.name), _default_of(item)
        through = marked(hint, Through)
        if is_dataclass(value) and not through:
            inner = _differing(value, every_key)
            if marked(hint, Inline):
                tree |= inner
            elif inner or default is MISSING:
                tree[item.name] = inner
        elif value is None:
            if default not in (None, MISSING):
                raise ValueError(f"{item.name} is None where the default is {default!r}")
        elif every_key or value != default:
            tree[item.name] = plain(through.plain(value) if through else value)
    return tree


def _apply(tree: dict[str, object], override: str, given: dict[Key, str]) -> list[Problem]:
    """Put one ``key=value`` into the tree and note it; returns the problem, if any."""
    key, value, _ = _split(override)
    if not key:
        return [Problem((), f"override '{override}': expected key=value, as in train.seed=3")]
    node = tree
    for length, part in enumerate(key[:-1], 1):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            name = dotted(key[:length])
            return [Problem((), f"override '{override}': {name} is a value, not a table")]
        node = inner
    node[key[-1]] = value
    given[key] = override
    return []


def _split(override: str) -> tuple[Key, object, str]:
    """Split an override into key, value and the text of the value; no key if it has none."""
    for index, character in enumerate(override):
        if character == "=" and (key := parse_key(override[:index].strip())):
            raw = override[index + 1 :].strip()
            try:
                tree = tomllib.loads("value = " + raw)
            except (ValueError, RecursionError):
                return key, raw, raw
            return key, tree["value"] if len(tree) == 1 else raw, raw
    return (), None, ""


class _Reader:
    """A reader of one tree as a ``kind``: what cannot be read is reported, the rest is made."""

    def __init__(self, origin: Origin, kind: type) -> None:
        self._origin = origin
        self._kind = kind
        self._checks: list[tuple[Key, Callable[[], Sequence[Problem]]]] = []

    def read(self, tree: Mapping[str, object]) -> tuple[object, list[Problem]]:
        """Read the value of the tree (``None`` if it cannot be made) and the problems."""
        result: object = None
        found: list[Problem] = []
        try:
            result = self._record(self._kind, tree, ())
        except _RejectedError as rejected:
            found += rejected.problems
        failed = [problem.key for problem in found]
        for key, check in self._checks:
            for problem in check():
                rests_on = [key + part for part in (problem.key, *problem.involves)]
                if not any(_touch(a, b) for a in rests_on for b in failed):
                    found.append(Problem(key + problem.key, problem.message))
        return result, found

    def _record(self, kind: type, table: Mapping[str, object], key: Key) -> object:
        rest = dict(table)
        made, problems = self._take(kind, rest, key)
        for name, value in rest.items():
            problems.append(self._unknown(kind, value, (*key, name)))
        if problems:
            raise _RejectedError(*problems)
        return made

    def _take(self, kind: type, rest: dict[str, object], key: Key) -> tuple[object, list[Problem]]:
        """Make a ``kind`` from its keys, and remove them from ``rest``."""
        given: dict[str, object] = dict.fromkeys(_origin_fields(kind), self._origin)
        problems: list[Problem] = []
        lacking = False
        for item, hint in fields_of(kind):
            if marked(hint, Inline):
                given[item.name], found = self._take(cast(type, unmarked(hint)), rest, key)
                problems += found
                lacking |= given[item.name] is None
            elif item.name in rest:
                try:
                    given[item.name] = self.value(rest.pop(item.name), hint, (*key, item.name))
                except _RejectedError as rejected:
                    problems += rejected.problems
                    lacking |= _default_of(item) is MISSING
            elif _default_of(item) is MISSING:
                lacking = True
                message = f"missing {_named((*key, item.name))}; expected {_expected(hint)}"
                problems.append(Problem(key, message))
        if lacking:
            return None, problems
        try:
            made = kind(**given)
        except ValueError as error:
            return None, [*problems, Problem(key, str(error))]
        if callable(check := getattr(made, "problems", None)):
            self._checks.append((key, cast(Callable[[], Sequence[Problem]], check)))
        return made, problems

    def _unknown(self, kind: type, value: object, key: Key) -> Problem:
        *table, name = key
        known = keys_of(kind)
        homes = [f"[{home}]" for home, inner in keys_of(self._kind).items() if name in inner]
        if homes:
            hint = f"it belongs to {' or '.join(homes)}"
        elif (close := nearest(name, list(known))) is not None:
            shown = f"[{close}]" if not table and known[close] else repr(close)
            hint = f"did you mean {shown}?"
        else:
            hint = f"known {'keys' if table else 'tables'}: {', '.join(known)}"
        what = f"table [{name}]" if isinstance(value, Mapping) and not table else _named(key)
        return Problem(key, f"unknown {what}; {hint}")

    def value(self, value: object, hint: object, key: Key) -> object:
        """Convert one value, or raise ``_RejectedError`` with all that is wrong in it."""
        override = self._origin.overrides.get(key)
        if override is None:
            return self._convert(value, hint, key)
        # What parses as TOML may have been meant as text: run.name=123.
        raw = _split(override)[2]
        is_none = raw.lower() == "none" and types.NoneType in _members(hint)
        rejected: list[_RejectedError] = []
        for each in (value, None if is_none else raw):
            result = self._attempt(each, hint, key)
            if not isinstance(result, _RejectedError):
                return result
            rejected.append(result)
        raise rejected[0]

    def _attempt(self, value: object, hint: object, key: Key) -> object:
        """Return the converted value or the error; a failed attempt leaves no checks behind."""
        before = len(self._checks)
        try:
            return self._convert(value, hint, key)
        except _RejectedError as rejected:
            del self._checks[before:]
            return rejected

    def _convert(self, value: object, hint: object, key: Key) -> object:
        kind = unmarked(hint)
        origin = typing.get_origin(kind)
        if kind is Any:
            return value
        if through := marked(hint, Through):
            return self._through(through, value, key)
        if origin in (Union, types.UnionType):
            return self._alternative(value, hint, key)
        if isinstance(value, Mapping) and isinstance(kind, type) and is_dataclass(kind):
            return self._record(kind, value, key)
        if isinstance(value, Mapping) and origin in (Mapping, dict):
            item = typing.get_args(kind)[1]
            reads = [partial(self.value, v, item, (*key, name)) for name, v in value.items()]
            return dict(zip(value, _all(reads), strict=True))
        hints = _item_hints(kind, len(value)) if isinstance(value, (list, tuple)) else None
        if hints is None:
            return _scalar(value, hint, key)
        items = zip(cast(Sequence[object], value), hints, strict=True)
        return tuple(_all([partial(self._convert, v, h, key) for v, h in items]))

    def _through(self, through: Through, value: object, key: Key) -> object:
        checked = through.check(value) if through.check and isinstance(value, Mapping) else ()
        found = [Problem(key + problem.key, problem.message) for problem in checked]
        try:
            written = self.value(value, through.written, key)
        except _RejectedError as rejected:
            raise _RejectedError(*found, *rejected.problems) from None
        if found:
            raise _RejectedError(*found)
        try:
            return through.build(written)
        except ValueError as error:
            raise _RejectedError(Problem(key, str(error))) from error

    def _alternative(self, value: object, hint: object, key: Key) -> object:
        """Find the first type of a union that takes the value."""
        for member in _members(hint):
            result = self._attempt(value, member, key)
            if not isinstance(result, _RejectedError):
                return result
            inside = [problem for problem in result.problems if problem.key != key]
            if inside and isinstance(value, Mapping):
                raise result
        raise _RejectedError(_mismatch(value, hint, key))


def _all(reads: Sequence[Callable[[], object]]) -> list[object]:
    """Run every read; all that is wrong is raised together."""
    made: list[object] = []
    problems: list[Problem] = []
    for read_one in reads:
        try:
            made.append(read_one())
        except _RejectedError as rejected:
            problems += rejected.problems
    if problems:
        raise _RejectedError(*problems)
    return made


def _touch(a: Key, b: Key) -> bool:
    """Check that one key is the other or lies in it. The root lies in nothing but itself."""
    return bool(a and b) and a[: len(b)] == b[: len(a)]


# ---------------------------------------------------------------------- one value, and its words


def _default_of(item: Field[object]) -> object:
    """Find the default of a field; ``MISSING`` if it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _origin_fields(kind: type) -> list[str]:
    """List the fields that are filled with where the values came from."""
    hints = typing.get_type_hints(kind)
    return [item.name for item in fields(kind) if hints[item.name] is Origin]


def _members(hint: object) -> tuple[object, ...]:
    """List the alternatives of a union, with their marks; the type itself if it is not a union."""
    kind = unmarked(hint)
    if typing.get_origin(kind) in (Union, types.UnionType):
        return tuple(m for member in typing.get_args(kind) for m in _members(member))
    return (hint,)


def _item_hints(kind: object, count: int) -> list[object] | None:
    """List the types of a tuple's items; ``None`` for another type or another number of items."""
    hints = typing.get_args(kind) if typing.get_origin(kind) is tuple else ()
    if len(hints) == 2 and hints[1] is ...:
        return [hints[0]] * count
    return list(hints) if hints and len(hints) == count else None


def _scalar(value: object, hint: object, key: Key) -> object:
    """Check type (a whole number may stand for a float) and bounds of a value, or reject it."""
    kind = unmarked(hint)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if _is_huge(value) or (is_number and not _is_within(value, hint)):
        raise _RejectedError(_mismatch(value, hint, key))
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
    raise _RejectedError(_mismatch(value, hint, key))


def _is_huge(value: object) -> bool:
    """Check for an integer of more than 64 bits, which neither TOML nor tensors hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _is_within(value: float, hint: object) -> bool:
    at_least, above = marked(hint, AtLeast), marked(hint, Above)
    return not ((at_least and value < at_least.limit) or (above and value <= above.limit))


def _mismatch(value: object, hint: object, key: Key) -> Problem:
    shown = "null" if value is None else literal(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = f"{_named(key)}: expected {_expected(hint)}, found {_what(value)}{shown}"
    choices = [c for member in _members(hint) for c in _choices(unmarked(member))]
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
        Any: ("a value", "values"),
        bool: ("true or false", "booleans"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        str: ("text", "texts"),
        Path: ("a path", "paths"),
    }
)


def _expected(hint: object) -> str:
    """Write a type in words, such as ``"auto" or a list of texts``."""
    words: list[str] = []
    for member in _members(hint):
        kind = unmarked(member)
        arguments, origin = typing.get_args(kind), typing.get_origin(kind)
        if origin is Literal:
            words += [literal(choice) for choice in arguments]
        elif choices := _choices(kind):
            words += [literal(choice) for choice in choices]
        elif origin is tuple and arguments[-1] is ...:
            words.append(f"a list of {_plural(arguments[0])}")
        elif origin is tuple:
            words.append(f"a list of {len(arguments)}: {', '.join(map(_expected, arguments))}")
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
    return _NOUNS[kind][1] if kind in _NOUNS else f"values, each {_expected(hint)}"


def _named(key: Key) -> str:
    """Write a key as messages call it, such as ``key 'seed' in [train]``."""
    if not key:
        return "the text"
    table = f" in [{dotted(key[:-1])}]" if len(key) > 1 else ""
    return f"key '{key[-1]}'{table}"
