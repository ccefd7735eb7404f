"""Private names of torch, found when they are needed, or an error that says what is missing."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["required"]


def required(name: str, use: str) -> Any:  # noqa: ANN401 - whatever torch has there
    """Find what torch has under the dotted ``name``, by which Meshwright does ``use``.

    Raises ImportError, naming both, where this torch lacks it.
    """
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for count, part in enumerate(rest, 1):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *rest[:count]]))
            except ImportError:
                raise ImportError(
                    f"torch {torch.__version__} has no {name}, by which Meshwright {use}: it works "
                    "with torch 2.11 and newer as far as they were known when it was written. "
                    "Install another torch, or a newer Meshwright"
                ) from None
        found = getattr(found, part)
    return found
