"""Converts TOML to nested frozen dataclasses and back; reports all mistakes in values at once.

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

``tomllib`` reads the text, a scanner finds the line of each key, and pydantic in strict mode makes
the dataclasses. A field of type ``Origin`` is no key: ``read`` fills it in, so that later checks
still name lines. An override is ``key=value``, ``--key=value``, or ``--key`` with the value as the
next word. The value is TOML or else bare text (``none`` sets a field to None where it may be);
overrides win over the text.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from meshwright.axes import Axes
from meshwright.errors import PlanError
from meshwright.settings import (
    Inline,
    Key,
    Origin,
    Problem,
    fields_of,
    keys_of,
    marked,
    nearest,
    split_overrides,
    unmarked,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")


def read(text: str, kind: type[T], *, source: str = "", overrides: Sequence[str] = ()) -> T:
    """Read TOML text as a ``kind``. ``source`` names the text in messages.

    Raises one ``PlanError`` with the first mistake of syntax, or with all unknown keys, wrong types
    and values.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        tree = tomllib.loads(text)
        origin = Origin(source, lines_of(text, tree))
    except (ValueError, RecursionError) as error:
        raise PlanError(_fault(error, text), source) from error
    return _made(tree, kind, origin, overrides)


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


def read_tree(tree: Mapping[str, object], kind: type[T], *, source: str = "") -> T:
    """Read a result of ``plain``, for example after a JSON round trip, as a ``kind``."""
    return _made(dict(tree), kind, Origin(source))


def _made(tree: dict[str, Any], kind: type[T], origin: Origin, overrides: Sequence[str] = ()) -> T:
    given: dict[Key, str] = {}
    origin = Origin(origin.source, origin.lines, given)
    problems: list[Problem] = []
    try:
        for override in chain(*split_overrides(overrides)):
            problems += _apply(tree, override, kind, given)
        result, found = _read(tree, kind, origin)
    except RecursionError as error:
        raise PlanError("expected less nesting of tables and lists", origin.source) from error
    if result is None or problems or found:
        raise origin.error([*problems, *found])
    return result


def review(record: object, origin: Origin) -> list[Problem]:
    """List the problems of a configuration built in code, by the rules of ``read``."""
    return _read(cast(Mapping[str, object], plain(record)), type(record), origin)[1]


def plain(record: object) -> object:
    """Convert a configuration to nested dictionaries, lists and scalars, with every key."""
    if isinstance(record, Axes):
        return record.mapping()
    if isinstance(record, Mapping):
        return {str(key): plain(inner) for key, inner in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(inner) for inner in record]
    if not is_dataclass(record):
        return str(record) if isinstance(record, (StrEnum, Path)) else record
    tree: dict[str, object] = {}
    for item, hint in fields_of(type(record)):
        inner = plain(getattr(record, item.name))
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
        value, default = getattr(record, item.name), item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if is_dataclass(value) and not isinstance(value, Axes):
            inner = _differing(value, every_key)
            if marked(hint, Inline):
                tree |= inner
            elif inner or default is MISSING:
                tree[item.name] = inner
        elif value is None:
            if default not in (None, MISSING):
                raise ValueError(f"{item.name} is None where the default is {default!r}")
        elif every_key or value != default:
            tree[item.name] = plain(value)
    return tree


# ------------------------------------------------------------------------------ values and types


@cache
def adapter(kind: type, *, is_finite: bool = True) -> TypeAdapter[tuple[Any]]:
    """Make pydantic's adapter that reads a ``kind``, in a list, from JSON; strict: true is not 1.

    It is JSON because strict mode accepts lists for tuples and tables for dataclasses only there.
    """
    from pydantic import ConfigDict, TypeAdapter

    # Dataclasses have no configuration of their own here; pydantic applies the enclosing one.
    config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=not is_finite, use_attribute_docstrings=True
    )
    return TypeAdapter(tuple[kind], config=config)


def _read(
    tree: Mapping[str, object], kind: type[T], origin: Origin
) -> tuple[T | None, list[Problem]]:
    """Make the value of the tree (``None`` if it cannot be made) and list the problems.

    Rules between keys are checked in what remains without the keys that have problems.
    """
    known = keys_of(kind)
    problems = [_unknown(kind, value, (name,)) for name, value in tree.items() if name not in known]
    data = _usable({name: tree[name] for name in tree if name in known}, (), problems)
    made, found = _validated(data, kind)
    failed = [problem.key for problem in problems]
    problems += [problem for problem in found if problem.key not in failed]
    failed += [problem.key for problem in found]
    if made is None:
        for key in failed:
            _remove(data, key)
        made = _validated(data, kind)[0]
    if made is None:
        return None, problems
    for key, record in _records(made):
        if hasattr(record, "origin"):
            # Frozen, but made above and seen by nobody yet.
            object.__setattr__(record, "origin", origin)
        for problem in getattr(record, "problems", tuple)():
            rests_on = [key + part for part in (problem.key, *problem.involves)]
            if not any(_touch(a, b) for a in rests_on for b in failed):
                problems.append(Problem(key + problem.key, problem.message))
    return made, problems


def _records(record: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """List a configuration and the tables in it, each with its key, inner ones first."""
    for item, hint in fields_of(type(record)):
        inner = getattr(record, item.name)
        if is_dataclass(inner):
            yield from _records(inner, key if marked(hint, Inline) else (*key, item.name))
    yield key, record


def _touch(a: Key, b: Key) -> bool:
    """Check whether one key is the other or inside it. The root is inside nothing but itself."""
    return bool(a and b) and a[: len(b)] == b[: len(a)]


def _usable(value: object, key: Key, problems: list[Problem]) -> Any:  # noqa: ANN401
    """Copy a tree with ``None`` for values that no key accepts: dates, integers over 64 bits."""
    match value:
        case Mapping():
            return {n: _usable(inner, (*key, n), problems) for n, inner in value.items()}
        case list():
            return [_usable(inner, key, problems) for inner in value]
        case int() if not -(2**63) <= value < 2**63:
            expected = "a number of at most 64 bits"
        case datetime.date() | datetime.time():
            expected = "text in quotes, or another value"
        case _:
            return value
    problems.append(Problem(key, f"{_named(key)}: expected {expected}, found {_shown(value)}"))
    return None


def _remove(data: dict[str, Any], key: Key) -> None:
    """Remove a key, or the outer one that holds it in a list."""
    for length, part in enumerate(key, 1):
        inner = data.get(part)
        if length == len(key) or not isinstance(inner, dict):
            data.pop(part, None)
            return
        data = inner


def _validated(data: dict[str, Any], kind: type[T]) -> tuple[T | None, list[Problem]]:
    """Make a ``kind`` from a tree, or list the problems."""
    from pydantic import ValidationError

    tree = dict(data)
    for item, hint in fields_of(kind):
        if marked(hint, Inline):
            keys = keys_of(cast(type, unmarked(hint)))
            tree[item.name] = {name: tree.pop(name) for name in keys if name in tree}
    try:
        return adapter(kind).validate_json(json.dumps([tree], default=str))[0], []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    found: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    values: dict[tuple[int | str, ...], object] = {}
    for each in errors:
        path: tuple[int | str, ...] = ()
        value: Any = data
        for part in each["loc"][1:]:
            try:
                value = value[part]
            except (LookupError, TypeError):
                continue  # the name of a type in a union, or of an inline table
            path = (*path, part)
        if each["type"] == "missing":
            path = (*path, each["loc"][-1])
        found.setdefault(path, []).append(each)
        values[path] = value
    # In a union of tables or lists, an error inside one says more than that of the union.
    outer = {path[:length] for path in found for length in range(len(path))}
    return None, [
        _problem(kind, path, each, values[path])
        for path, each in found.items()
        if path not in outer
    ]


_EXPECTED = MappingProxyType(
    {
        "bool_type": "true or false",
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a number",
        "string_type": "text",
        "tuple_type": "a list",
        "too_long": "at most {max_length} items",
        "dict_type": "a table",
        "dataclass_type": "a table",
        "literal_error": "{expected}",
        "enum": "{expected}",
        "greater_than_equal": "a number of at least {ge:g}",
        "greater_than": "a number above {gt:g}",
    }
)
"""What pydantic expected, by the type of its error."""


def _problem(
    kind: type, path: Sequence[int | str], errors: Sequence[ErrorDetails], value: object
) -> Problem:
    """Describe pydantic's errors at one place, for each type of a union."""
    key = tuple(str(part) for part in takewhile(lambda part: isinstance(part, str), path))
    first = errors[0]
    if first["type"] == "unexpected_keyword_argument":
        return _unknown(kind, value, key)
    if first["type"] == "value_error":
        return Problem(key, str(first["ctx"]["error"]))
    if first["type"] == "missing" and len(key) == len(path):
        return Problem(key, f"missing {_named(key)}")
    words: list[str] = []
    for each in errors:
        expected = each["msg"]
        if each["type"] in _EXPECTED:
            expected = _EXPECTED[each["type"]].format_map(each.get("ctx", {}))
        words += re.split(", | or ", expected.replace("'", '"')) if "'" in expected else [expected]
    if first["type"] == "missing":
        words = ["another item"]
    *others, last = dict.fromkeys(words)
    expected = ", ".join(others) + " or " * bool(others) + last
    close = nearest(value, [w.strip('"') for w in words]) if isinstance(value, str) else None
    hint = f"; did you mean {literal(close)}?" if close else ""
    return Problem(key, f"{_named(key)}: expected {expected}, found {_shown(value)}{hint}")


def _unknown(kind: type, value: object, key: Key) -> Problem:
    *table, name = key
    known = cast(dict[str, dict[str, object]], whole := keys_of(kind))
    for part in table:
        known = cast(dict[str, dict[str, object]], known[part])
    homes = [f"[{home}]" for home, inner in whole.items() if name in inner]
    if homes:
        hint = f"it belongs to {' or '.join(homes)}"
    elif (close := nearest(name, list(known))) is not None:
        shown = f"[{close}]" if not table and known[close] else repr(close)
        hint = f"did you mean {shown}?"
    else:
        hint = f"known {'keys' if table else 'tables'}: {', '.join(known)}"
    what = f"table [{name}]" if isinstance(value, Mapping) and not table else _named(key)
    return Problem(key, f"unknown {what}; {hint}")


def _shown(value: object) -> str:
    """Format a value, and name its type where that is not clear to a reader."""
    shown = "null" if value is None else literal(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    match value:
        case int() if not -(2**63) <= value < 2**63:
            return f"a number of more than 64 bits, {shown}"
        case Mapping():
            return f"the table {shown}"
        case list() | tuple():
            return f"the list {shown}"
        case str():
            return f"the text {shown}"
    return shown


def _named(key: Key) -> str:
    """Format a key for messages, such as ``key 'seed' in [train]``."""
    if not key:
        return "the text"
    table = f" in [{dotted(key[:-1])}]" if len(key) > 1 else ""
    return f"key '{key[-1]}'{table}"


# ------------------------------------------------------------------------------------- overrides


def _apply(tree: dict[str, Any], override: str, kind: type, given: dict[Key, str]) -> list[Problem]:
    """Put one ``key=value`` into the tree and record it; returns the problem, if any."""
    key, value, raw = _split(override)
    if not key:
        return [Problem((), f"override '{override}': expected key=value, as in train.seed=3")]
    node = tree
    for length, part in enumerate(key[:-1], 1):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            name = dotted(key[:length])
            return [Problem((), f"override '{override}': {name} is a value, not a table")]
    given[key] = override
    # What parses as TOML may have been meant as text: run.name=123. Not in a table of any keys,
    # which takes every text: there a date, or a number of over 64 bits, raises as in a file.
    problems: list[Problem] = []
    _usable(value, key, problems)
    if problems and len(key) > 2:
        return problems
    for node[key[-1]] in (value, None, raw) if raw.lower() == "none" else (value, raw):
        found = _read(tree, kind, Origin())[1]
        if not any(_touch(problem.key, key) for problem in found):
            return []
    node[key[-1]] = value
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


# ------------------------------------------------------------------------------ the text of TOML

# Strings and comments are whole tokens, so that what they contain is not taken for structure.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}=\n]",
    re.DOTALL,
)
_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def lines_of(text: str, tree: Mapping[str, object]) -> dict[Key, int]:
    """Find the line, counted from 1, where each table and key is first given; ``text`` is valid."""
    lines: dict[Key, int] = {}
    table: Key = ()
    begin = depth = 0
    equals = closed = -1  # the ends of a key and of a header in this statement
    for token in _TOKEN.finditer(text + "\n"):
        match token.group():
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
                if not depth and closed < 0:
                    closed = token.end()
            case "=" if not depth and equals < 0:
                equals = token.start()
            case "\n" if not depth:
                key: Key = ()
                if equals >= 0:
                    key = table + (parse_key(text[begin:equals]) or ())
                elif closed >= 0:
                    table = key = parse_key(text[begin:closed].strip(" \t[]")) or ()
                line = text.count("\n", 0, begin) + 1
                for length in range(1, len(key) + 1):
                    lines.setdefault(key[:length], line)
                begin, equals, closed = token.end(), -1, -1
    _add_inner(lines, tree, ())
    return lines


def _add_inner(lines: dict[Key, int], tree: Mapping[str, object], key: Key) -> None:
    """Give the keys of inline tables the line numbers of their tables."""
    for part, inner in tree.items():
        lines.setdefault((*key, part), lines.get(key, 1))
        if isinstance(inner, Mapping):
            _add_inner(lines, inner, (*key, part))


def _fault(error: Exception, text: str) -> str:
    """Describe where and why the text is not TOML."""
    if isinstance(error, RecursionError):
        return "not valid TOML: nested too deeply"
    found = _POSITION.search(str(error))
    rows = text.split("\n")
    row = int(found[1] or len(rows)) if found else 1
    shown = rows[row - 1].strip()
    reason = _POSITION.sub("", str(error))
    hint = ""
    if found and not found[1]:
        hint = "; a bracket or a quote is not closed, or a value is missing"
    elif reason == "Invalid value":
        hint = '; text needs quotes, as in key = "text"'
    elif reason.startswith(("Cannot overwrite", "Cannot declare")):
        hint = "; it is given twice"
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return f"line {row}: not valid TOML: {reason[:1].lower() + reason[1:]} in `{shown}`{hint}"


def dotted(key: Key) -> str:
    """Format a key as in TOML, such as ``tensor.rules."layers.*"``."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else literal(part) for part in key)


def literal(value: object) -> str:
    """Format a value as in TOML: scalars, sequences, and mappings as inline tables."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value))
        case str():
            return '"' + _ESCAPED.sub(_escape, value) + '"'
        case Mapping():
            inner = (f"{dotted((str(key),))} = {literal(item)}" for key, item in value.items())
            return "{ " + ", ".join(inner) + " }" if value else "{}"
        case Sequence():
            return "[" + ", ".join(literal(item) for item in value) + "]"
    return str(value)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return "\\" + character if character in '"\\' else f"\\u{ord(character):04x}"


def write(tree: Mapping[str, object], key: Key = ()) -> str:
    """Format a tree as TOML text: values first, then each mapping as a table with its header."""
    values = [
        f"{dotted((name,))} = {literal(value)}\n"
        for name, value in tree.items()
        if not isinstance(value, Mapping)
    ]
    tables = [
        (write(value, (*key, name)), (*key, name))
        for name, value in tree.items()
        if isinstance(value, Mapping)
    ]
    blocks = ["".join(values)] if values else []
    for text, name in tables:
        # A table that only holds tables is declared by theirs.
        blocks.append(text if text.startswith("[") else f"[{dotted(name)}]\n{text}")
    return "\n".join(blocks)


def parse_key(text: str) -> Key | None:
    """Find the path of a key as written before an equals sign; ``None`` if it is not a key."""
    try:
        tree = tomllib.loads(text + " = 0")
    except ValueError:
        return None
    key: list[str] = []
    while isinstance(tree, dict) and tree:
        (part, tree), *_ = tree.items()
        key.append(part)
    return tuple(key) if tree == 0 else None
