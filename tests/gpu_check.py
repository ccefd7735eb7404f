"""Runs the GPU tests under any Python that has torch: with pytest, or without it by a plain loop.

Only files that hold a test marked ``gpu`` are loaded, so that what other tests need may be missing.
Without pytest, they run one after the other; a test that takes a fixture other than ``ranks`` and
``tmp_path`` is left out, by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
MARK = "mark." + "gpu"
OPTIONS = [
    *("-c", os.devnull, "-o", "markers=gpu\nslow\nsoak", "-m", "gpu"),
    *("--import-mode=importlib", "--strict-markers", "-ra", "--durations=10"),
]


def main() -> int:
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text()]
    if not files:
        print("no test is marked gpu: nothing to run")
        return 0
    if importlib.util.find_spec("pytest") is None:
        return run_plainly(files)
    # Plugins that happen to be installed stay out; ours is named, since it may not be installed.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    plugin = ["-p", "meshwright.testing.plugin"]
    return int(pytest.main([*OPTIONS, f"--rootdir={TESTS.parent}", *plugin, *map(str, files)]))


class _Marks:
    """Stands in for ``pytest.mark``: ``gpu`` is remembered, everything else is ignored."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        def mark(*arguments: object, **_: object) -> object:
            if len(arguments) == 1 and callable(arguments[0]):
                if name == "gpu":
                    arguments[0].is_gpu = True  # type: ignore[attr-defined]
                return arguments[0]
            return mark

        return mark


def run_plainly(files: list[Path]) -> int:
    """Run the marked functions of ``files`` that take no argument, and count what came out."""
    stand_in = types.ModuleType("pytest")
    stand_in.mark = _Marks()  # type: ignore[attr-defined]
    sys.modules["pytest"] = stand_in
    passed, failed, left_out = 0, 0, 0
    for name, test in _marked(files):
        wanted = inspect.signature(test).parameters.keys()
        if not wanted <= _FIXTURES.keys():
            left_out += 1
            print(f"left out {name}: it takes {', '.join(wanted)}, and pytest is missing")
            continue
        try:
            test(**{fixture: _FIXTURES[fixture]() for fixture in wanted})
        except Exception:
            failed += 1
            print(f"FAILED {name}")
            traceback.print_exc()
        else:
            passed += 1
            print(f"passed {name}")
    print(f"{passed} passed, {failed} failed, {left_out} left out")
    return 1 if failed else 0


def _marked(files: list[Path]) -> Iterator[tuple[str, Callable[..., object]]]:
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            if getattr(value, "is_gpu", False):
                yield f"{path.name}::{name}", value


def _ranks() -> object:
    return importlib.import_module("meshwright.testing").ranks


_FIXTURES: dict[str, Callable[[], object]] = {
    "ranks": _ranks,
    "tmp_path": lambda: Path(tempfile.mkdtemp(prefix="meshwright-")),
}


if __name__ == "__main__":
    sys.exit(main())
