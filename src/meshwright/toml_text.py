"""Parses TOML text to a tree, with the line of each key and all faults at once; writes trees.

The standard library's parser gives the values, but no positions, and it stops at the first fault.
Here a small scanner cuts the text into statements (a header, or a key with its value, which may
span lines). It gives each key its line. Only when the whole text does not parse is each statement
parsed on its own, so that one bad line does not hide the faults of the others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[str, ...]
"""The path of a key from the root, such as ``("train", "seed")``."""

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
_LOOKS_LIKE_STATEMENT = re.compile(r"""[ \t]*(?:\[[^\n]*\][ \t]*(?:\#|$)|[\w"'.\- ]+=)""", re.M)
_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Fault(NamedTuple):
    """A fault of syntax and the line where it is, counted from 1."""

    line: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of a TOML text. With faults, the tree has every statement that could be read."""

    tree: dict[str, object]
    lines: dict[Key, int]
    """The line, counted from 1, where each table and key is first given."""
    faults: tuple[Fault, ...]


def dotted(key: Key) -> str:
    """Write a key as it is written in TOML, such as ``tensor.rules."layers.*"``."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else literal(part) for part in key)


def literal(value: object) -> str:
    """Write a value as TOML writes it: scalars, sequences, and mappings as inline tables."""
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
    """Write a tree as TOML text: values first, then each mapping as a table with its header."""
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
        # A table that only holds tables is declared by their headers.
        blocks.append(text if text.startswith("[") else f"[{dotted(name)}]\n{text}")
    return "\n".join(blocks)


def parse_key(text: str) -> Key | None:
    """Find the path of a key as written before an equals sign; ``None`` if it is not a key."""
    try:
        key, node = _descend(tomllib.loads(text + " = 0"))
    except ValueError:
        return None
    return key if node == 0 else None


def _descend(tree: object) -> tuple[Key, object]:
    """Follow the first keys of a tree down; returns their path, and what is at its end."""
    key: list[str] = []
    while isinstance(tree, dict) and tree:
        (part, tree), *_ = tree.items()
        key.append(part)
    return tuple(key), tree


def parse(text: str) -> Document:
    """Read a TOML text. Never raises: faults are listed in the document."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    statements = list(_statements(text))
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        tree, faults = _recover(statements)
        return Document(
            tree=tree,
            lines=_lines(statements),
            faults=tuple(faults) or (_fault(error, 1, text),),
        )
    return Document(tree=tree, lines=_lines(statements), faults=())


class _Statement(NamedTuple):
    """A statement of the text: its whole key and its value, or its fault."""

    line: int
    is_header: bool
    key: Key = ()
    value: object = None
    fault: Fault | None = None


def _statements(text: str) -> Iterator[_Statement]:
    position, line = 0, 1
    table: Key = ()
    while position < len(text):
        begin = position
        while text.startswith((" ", "\t"), begin):
            begin += 1
        is_header = text.startswith("[", begin)
        end = _end(text, begin, is_header)
        statement = text[begin:end]
        if statement.strip() and not statement.startswith("#"):
            found = _read(line, statement, is_header)
            if is_header and not found.fault:
                table = found.key
            yield found if is_header else found._replace(key=table + found.key)
        line += statement.count("\n") + 1
        position = end + 1


def _end(text: str, begin: int, is_header: bool) -> int:
    """Find the end of the statement: the first newline outside of strings and brackets."""
    depth = 0
    first_newline = -1
    for token in _TOKEN.finditer(text, begin):
        match token.group():
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case "\n" if is_header or depth <= 0:
                return token.start()
            case "\n" if first_newline < 0 and _LOOKS_LIKE_STATEMENT.match(text, token.end()):
                first_newline = token.start()
    # An open bracket would swallow the rest: end before the next line that looks like a statement.
    return first_newline if depth > 0 and first_newline >= 0 else len(text)


def _read(line: int, text: str, is_header: bool) -> _Statement:
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return _Statement(line, is_header, fault=_fault(error, line, text))
    key, node = _descend(tree) if is_header else _assignment(text, tree)
    return _Statement(line, is_header, key, node)


def _assignment(text: str, tree: object) -> tuple[Key, object]:
    equals = next(token.start() for token in _TOKEN.finditer(text) if token.group() == "=")
    key = parse_key(text[:equals]) or ()
    for part in key:
        tree = tree[part] if isinstance(tree, dict) else None
    return key, tree


def _fault(error: Exception, line: int, text: str) -> Fault:
    if isinstance(error, RecursionError):
        return Fault(line, "not valid TOML: nested too deeply")
    found = _POSITION.search(str(error))
    rows = text.split("\n")
    row = int(found[1] or len(rows)) if found else 1
    shown = rows[row - 1].strip()
    reason = _POSITION.sub("", str(error))
    if found and not found[1]:
        hint = "; a bracket or a quote is not closed, or a value is missing"
    else:
        hint = '; text needs quotes, as in key = "text"' if reason == "Invalid value" else ""
    if len(shown) > 60:
        shown = shown[:57] + "..."
    message = f"not valid TOML: {reason[:1].lower() + reason[1:]} in `{shown}`{hint}"
    return Fault(line + row - 1, message)


def _lines(statements: list[_Statement]) -> dict[Key, int]:
    lines: dict[Key, int] = {}
    for statement in statements:
        if statement.fault:
            continue
        for length in range(1, len(statement.key) + 1):
            lines.setdefault(statement.key[:length], statement.line)
        if not statement.is_header:
            _add_inner(lines, statement.key, statement.value, statement.line)
    return lines


def _add_inner(lines: dict[Key, int], key: Key, value: object, line: int) -> None:
    """Give the keys of an inline table the line of its statement."""
    if isinstance(value, dict):
        for part, inner in value.items():
            lines.setdefault((*key, part), line)
            _add_inner(lines, (*key, part), inner, line)


def _recover(statements: list[_Statement]) -> tuple[dict[str, object], list[Fault]]:
    """Make the tree of all statements that can be read, and list the faults of the others."""
    tree: dict[str, object] = {}
    faults: list[Fault] = []
    given: dict[Key, int] = {}
    for reading in statements:
        if reading.fault:
            faults.append(reading.fault)
            continue
        key = reading.key
        is_repeatable = isinstance(reading.value, list) and reading.is_header
        if key in given and not is_repeatable:
            name = f"table [{dotted(key)}]" if reading.is_header else f"key '{dotted(key)}'"
            faults.append(Fault(reading.line, f"{name} is given twice, first on line {given[key]}"))
            continue
        given.setdefault(key, reading.line)
        if not _put(tree, reading):
            faults.append(
                Fault(reading.line, f"'{dotted(key)}' is given both as a table and as a value")
            )
    return tree, faults


def _put(tree: dict[str, object], reading: _Statement) -> bool:
    """Add a statement to the tree; False if a value stands where a table is needed."""
    node: object = tree
    *outer, last = reading.key
    for part in outer:
        if not isinstance(node, dict):
            return False
        node = node.setdefault(part, {})
        if isinstance(node, list) and node:
            node = node[-1]
    if not isinstance(node, dict):
        return False
    before = node.get(last)
    if reading.is_header and isinstance(before, type(reading.value)):
        if isinstance(before, list):
            before.append({})
        return True
    if last in node:
        return False
    node[last] = reading.value
    return True
