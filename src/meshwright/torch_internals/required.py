"""Looks up private names of torch when they are needed; a missing one raises a clear error."""

from __future__ import annotations

import importlib
from types import FrameType
from typing import Any

import torch


def required(name: str, use: str) -> Any:  # noqa: ANN401 - whatever torch has there
    """Look up the dotted ``name`` in torch; ``use`` says what Meshwright does with it.

    Raises ImportError, naming both, if this torch lacks it.
    """
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for count, part in enumerate(rest, 1):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join([first, *rest[:count]]))
        except ImportError:
            raise lacking(name, use) from None
    return found


def variable_of(frame: FrameType, name: str, use: str) -> Any:  # noqa: ANN401
    """Return the variable ``name`` of the torch function that runs in ``frame``.

    Raises ImportError, naming both, if the function of this torch has none.
    """
    variables = frame.f_locals
    if name not in variables:
        function = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        raise lacking(f"variable {name!r} in {function}", use)
    return variables[name]


def lacking(what: str, use: str) -> ImportError:
    """Make the error for a torch without ``what``; ``use`` says what Meshwright does with it."""
    return ImportError(
        f"torch {torch.__version__} has no {what}, by which Meshwright {use}: it works with torch "
        "2.11 and newer as far as they were known when it was written. Install another torch, or "
        "a newer Meshwright"
    )
