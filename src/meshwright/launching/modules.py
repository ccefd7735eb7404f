"""Test modules in ranks: the same names and the same rewritten assertions as in pytest.

pytest imports test modules in its own way (files outside ``sys.path``, rewritten ``assert``
statements). A rank that unpickles a function of such a module has to find it under the same name,
with its ``assert`` statements rewritten, too.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

_REWRITER = "_pytest.assertion.rewrite"
_HOOK = "AssertionRewritingHook"


def rewritten() -> dict[str, str]:
    """Map each module that pytest has imported here as a test or conftest to its file."""
    return {
        name: file
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and _is_test_module(name, module)
    }


def _is_test_module(name: str, module: ModuleType) -> bool:
    loader = getattr(module, "__loader__", None)
    inside = name.partition(".")[0] in {"meshwright", "_pytest", "_hypothesis_pytestplugin"}
    return type(loader).__name__ == _HOOK and not inside


def preloadable() -> list[str]:
    """List modules of this process that the server may load once for all later calls."""
    is_tested = _REWRITER in sys.modules
    packages = ("meshwright", "transformers") if is_tested else ("meshwright",)
    names = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    rewriter = [_REWRITER, "pytest"] if is_tested else []
    hypothesis = ["hypothesis"] if "hypothesis" in sys.modules else []
    return rewriter + hypothesis + names


def install(files: Mapping[str, str]) -> None:
    """Make this process import the test modules ``files`` under pytest's names."""
    if files:
        sys.meta_path.insert(0, _TestModules(files))
        sys.meta_path.append(_Packages(files))


class _TestModules(MetaPathFinder):
    """Finds exactly the named files."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        is_package = os.path.basename(file) == "__init__.py"
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_RewritingLoader(fullname, file),
            submodule_search_locations=[os.path.dirname(file)] if is_package else None,
        )


class _Packages(MetaPathFinder):
    """Stands in for parent packages of test modules that nothing else finds."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._parents = {
            ".".join(parts[:count])
            for parts in (name.split(".") for name in files)
            for count in range(1, len(parts))
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._parents:
            return None
        return ModuleSpec(fullname, None, is_package=True)


class _RewritingLoader(SourceFileLoader):
    """Loads a source file with pytest's rewritten ``assert`` statements, if pytest is loaded."""

    def get_code(self, fullname: str) -> CodeType | None:
        rewriter = sys.modules.get(_REWRITER)
        if rewriter is None:
            return super().get_code(fullname)
        path = self.get_filename(fullname)
        return _cached(rewriter, path) or _rewritten(rewriter, path, self.get_data(path))


def _cached(rewriter: ModuleType, path: str) -> CodeType | None:
    """Read pytest's cached rewriting; None, to rewrite it here, for any failure."""
    source = pathlib.Path(path)
    try:
        kept = rewriter.get_cache_dir(source) / (source.stem + rewriter.PYC_TAIL)
        return rewriter._read_pyc(source, kept)
    except (AttributeError, TypeError, OSError):
        return None


def _rewritten(rewriter: ModuleType, path: str, source: bytes) -> CodeType:
    tree = ast.parse(source, filename=path)
    rewriter.rewrite_asserts(tree, source, path)
    return compile(tree, path, "exec", dont_inherit=True)
