"""The arguments of a command: its options, and mistakes in them reported in one line."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
import sys
import textwrap
from typing import Protocol

import tyro

from meshwright.errors import PlanError
from meshwright.settings import split_overrides


class Command(Protocol):
    """The options of a command, and what it does."""

    def run(self, words: list[str]) -> int:
        """Run the command with its arguments ``words``; returns the exit status."""


def parse(kind: type[Command], name: str, words: list[str]) -> Command:
    """Parse a command's own options. Raises ``PlanError`` with one line for a mistake."""
    told, shown = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
    about = inspect.cleandoc(kind.__doc__ or "")
    option_lines = getattr(kind, "option_lines", None)
    own = split_overrides(words)[1] if option_lines else words
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            return tyro.cli(kind, prog=f"meshwright {name}", args=own, description=about)
    except SystemExit as error:
        if error.code:
            raise PlanError(_unboxed(told.getvalue())) from None
        shown.seek(0)
        for line in shown.read().splitlines():  # tyro wraps only the lines in boxes
            print(textwrap.fill(line, 80, subsequent_indent=" " * 4) if len(line) > 80 else line)
        if option_lines:
            print("\n".join(option_lines()))
        raise


def _unboxed(text: str) -> str:
    """Put tyro's text on one line, without its box and the advice below."""
    text = re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", " ", text)
    text = re.split(r"Argument helptext|For full helptext", text)[0]
    text = re.sub(r"^\s*(Required|Unrecognized) options\s|^\s*Value error\s", "", text)
    return " ".join(word for word in text.split() if set(word) != {"-"}) or "wrong arguments"


def at_least_0(option: str, given: str) -> float:
    """Return the number ``given`` for ``option``; raises ``ValueError`` if it is below 0."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e100:  # sums of larger ones are not finite
        raise ValueError(f"{option}: expected a number from 0 to 1e100, found {given}")
    return value


def one_line(error: BaseException) -> str:
    """Return the text of ``error`` on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def fail(command: str, *lines: str, status: int) -> int:
    """Write ``lines`` to standard error, each with the command's name; returns ``status``."""
    for line in lines:
        print(f"meshwright {command}: {line}".replace(" :", ":"), file=sys.stderr)
    return status
