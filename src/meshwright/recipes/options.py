"""The keys of the configuration in words, read from the dataclasses that are the configuration."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from itertools import pairwise
from typing import cast

from meshwright.axes import KNOWN_AXES, RESERVED_AXES
from meshwright.recipes.config import TrainConfig
from meshwright.settings import Inline, Through, fields_of, marked, unmarked
from meshwright.toml_text import literal

__all__ = ["option_lines"]


def option_lines(kind: type = TrainConfig) -> list[str]:
    """Make a line for each key of the configuration, table by table: option, default, meaning."""
    usable = [name for name in KNOWN_AXES if name not in RESERVED_AXES]
    lines = [
        "Keys of the configuration, with their defaults:",
        f"  {'--axes.NAME':<31} {'1':<15} Ranks along an axis: {', '.join(usable)}.",
    ]
    for table, record in _tables(kind):
        meanings = _meanings(record)
        for item, _ in fields_of(record):
            meaning = meanings.get(item.name, "").replace("``", "")
            lines.append(
                f"  {f'--{table}.{item.name}':<31} {_default(item):<15} {meaning}".rstrip()
            )
    return lines


def _tables(kind: type) -> Iterator[tuple[str, type]]:
    for item, hint in fields_of(kind):
        inner = unmarked(hint)
        if not isinstance(inner, type) or not is_dataclass(inner) or marked(hint, Through):
            continue
        if marked(hint, Inline):
            yield from _tables(inner)
        else:
            yield item.name, inner


def _default(item: Field[object]) -> str:
    if item.default is MISSING or item.default is None:
        return "none"
    return str(literal(cast(object, item.default)))


def _meanings(record: type) -> dict[str, str]:
    """List the first line of the text below each field, as it stands in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    statements = body.body if isinstance(body, ast.ClassDef) else []
    found: dict[str, str] = {}
    for field, text in pairwise(statements):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(meaning))),
            ):
                found[name] = " ".join(meaning.split())
    return found
