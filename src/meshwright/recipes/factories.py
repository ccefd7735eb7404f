"""Functions named in a configuration: finds them, calls them, reports their errors in one line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, PlanError
from meshwright.settings import nearest


@dataclass(frozen=True, slots=True)
class Factory:
    """A function, and the key that names it."""

    key: str
    """As messages call it, such as ``[model] factory = "my_models:build"``."""
    function: Callable[..., Any]

    def __call__(self, *args: object, **options: object) -> Any:  # noqa: ANN401 - what it returns
        """Call it. Raises ``PlanError`` with its signature and the line where it failed."""
        try:
            return self.function(*args, **options)
        except MeshwrightError:
            raise
        except Exception as error:
            raise PlanError(f"{self.key}: it raised {told(error)}{self._signature()}") from error

    def fail(self, expected: str, found: object) -> PlanError:
        """Make the error for a result that is not ``expected``."""
        return PlanError(
            f"{self.key}: expected it to return {expected}, found "
            f"{type(found).__name__}{self._signature()}"
        )

    def _signature(self) -> str:
        with contextlib.suppress(TypeError, ValueError):  # one written in C has none
            return f"; it is {self.function.__name__}{inspect.signature(self.function)}"
        return ""


def factory(table: str, key: str, name: str, home: Path) -> Factory:
    """Find the function ``package.module:name``, on ``sys.path`` or in the folder ``home``.

    Nothing is imported but that module. Raises ``PlanError`` in one line.
    """
    label = f'[{table}] {key} = "{name}"'
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise PlanError(f"{label}: expected package.module:function")
    if str(home) not in sys.path:
        sys.path.append(str(home))  # last, so that it hides no other module
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PlanError(f"{label}: the module cannot be imported: {told(error)}") from error
        raise PlanError(
            f"{label}: found no module '{error.name}' on sys.path, nor in {home}"
        ) from error
    except Exception as error:
        raise PlanError(f"{label}: the module cannot be imported: {told(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "nothing of this name" if found is None else f"a {type(found).__name__}"
        close = nearest(attribute, [n for n in vars(module) if callable(getattr(module, n))])
        hint = f"; did you mean '{close}'?" if close else ""
        raise PlanError(f"{label}: expected a function, found {what} in {module_name}{hint}")
    return Factory(label, found)


def told(error: BaseException) -> str:
    """Write ``error`` in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames[1:] else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
