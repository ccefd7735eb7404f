"""One source tree as syntax trees, and the dotted names that each of its files uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

__all__ = ["Function", "Source", "Tree", "Use", "is_under"]

PACKAGE = "meshwright"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_IMPORTERS = {"importlib.import_module", "importlib.util.find_spec", "__import__"}


class Use(NamedTuple):
    """A dotted name that a file uses, by import or by attribute."""

    name: str
    line: int


def is_under(name: str, prefix: str) -> bool:
    """Whether a dotted name is ``prefix`` or lies below it."""
    return name == prefix or name.startswith(prefix + ".")


@dataclass(frozen=True)
class Source:
    """One file. ``path`` is relative to the package, ``module`` is its dotted name."""

    path: str
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes, walked once for all rules."""
        return tuple(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def room(self) -> str:
        """The first folder or file under the package; empty for the package itself."""
        return self.module.removeprefix(PACKAGE).lstrip(".").split(".")[0]

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(node for node in self.nodes if isinstance(node, Function))

    @cached_property
    def docstrings(self) -> frozenset[int]:
        """The identities of the string constants that are docstrings."""
        owners = [self.tree, *self.functions]
        owners += [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        firsts = [owner.body[0] for owner in owners if owner.body]
        return frozenset(
            id(first.value)
            for first in firsts
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        )

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str, str]]:
        """(local name, what it stands for, what is loaded) for each name an import binds."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname or first, alias.name if alias.asname else first, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{self.origin(node)}.{alias.name}"
                yield (alias.asname or alias.name, name, name)

    def origin(self, node: ast.ImportFrom) -> str:
        """The absolute dotted name after ``from``."""
        if not node.level:
            return node.module or ""
        here = self.module.split(".") + ([""] if self.is_package else [])
        parents = here[: len(here) - node.level]
        return ".".join([*parents, node.module] if node.module else parents)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local names that stand for something imported, also through plain assignment."""
        found: dict[str, str] = {"__import__": "__import__", "getattr": "getattr"}
        nodes = self.nodes
        for node in nodes:
            found.update({local: name for local, name, _ in self.imported(node)})
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                dotted = _dotted(node.value, found)
                if dotted is not None and node.targets[0].id not in found:
                    found[node.targets[0].id] = dotted
        return found

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Every dotted name in use: imports, attributes of imported names, import by string."""
        found: set[Use] = set()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                found.add(Use(self.origin(node), node.lineno))
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.update(Use(name, node.lineno) for *_, name in self.imported(node))
            elif isinstance(node, ast.Attribute | ast.Call):
                dotted = _dotted(node, self.aliases)
                if dotted is not None:
                    found.add(Use(dotted, node.lineno))
        return tuple(sorted(found, key=lambda use: (use.line, use.name)))

    @cached_property
    def calls(self) -> tuple[tuple[str, ast.Call], ...]:
        """Calls of what is imported, each with its dotted name."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        named = ((_dotted(node.func, self.aliases), node) for node in calls)
        return tuple((name, node) for name, node in named if name is not None)

    @cached_property
    def strings(self) -> tuple[Use, ...]:
        """Every string constant that is not a docstring."""
        return tuple(
            Use(node.value, node.lineno)
            for node in self.nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in self.docstrings
        )

    @cached_property
    def dotted_strings(self) -> tuple[Use, ...]:
        """The string constants that are dotted names and nothing else."""
        return tuple(
            use
            for use in self.strings
            if "." in use.name and all(part.isidentifier() for part in use.name.split("."))
        )

    @cached_property
    def foreign_attributes(self) -> tuple[Use, ...]:
        """The attributes of anything but ``self``, ``cls`` and modules that are not torch's."""
        return tuple(
            Use(node.attr, node.lineno)
            for node in self.nodes
            if isinstance(node, ast.Attribute)
            and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            and is_under(_dotted(node, self.aliases) or "torch", "torch")
        )

    @cached_property
    def prefixes(self) -> tuple[Use, ...]:
        """What f-strings begin with that may name an attribute."""
        firsts = [node.values[0] for node in self.nodes if isinstance(node, ast.JoinedStr)]
        return tuple(
            Use(first.value, first.lineno)
            for first in firsts
            if isinstance(first, ast.Constant) and str(first.value).isidentifier()
        )

    @cached_property
    def single_strings(self) -> frozenset[Use]:
        """The strings that do not stand in a literal table, or in an f-string."""
        tables = ast.Tuple | ast.List | ast.Set | ast.Dict | ast.JoinedStr
        listed = {
            Use(part.value, part.lineno)
            for node in self.nodes
            if isinstance(node, tables)
            for part in ast.iter_child_nodes(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        return frozenset(self.strings) - listed

    @cached_property
    def defined(self) -> frozenset[str]:
        """The names of functions, classes, variables and own fields that the file makes."""
        found: set[str] = set()
        for node in self.nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.arg(arg=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
        return frozenset(found)


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The dotted name that an expression stands for, if it starts at an imported name."""
    match node:
        case ast.Name(id=name):
            return aliases.get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = _dotted(value, aliases)
            return None if owner is None else f"{owner}.{attr}"
        case ast.Call(func=function, args=[first, *rest]):
            called = _dotted(function, aliases)
            if called in _IMPORTERS and isinstance(first, ast.Constant):
                return str(first.value)
            if called == "getattr" and rest and isinstance(rest[0], ast.Constant):
                owner = _dotted(first, aliases)
                return None if owner is None else f"{owner}.{rest[0].value}"
    return None


class Tree:
    """All files of one package folder."""

    def __init__(self, root: Path) -> None:
        self.sources = tuple(
            Source(
                path=path.relative_to(root).as_posix(),
                module=_module(path.relative_to(root)),
                text=path.read_text(encoding="utf-8"),
            )
            for path in sorted(root.rglob("*.py"))
        )
        self.modules = {source.module: source for source in self.sources}

    def children(self, package: Source) -> list[Source]:
        """The modules and packages directly in the folder of a package."""
        return [
            source
            for name, source in self.modules.items()
            if name.rpartition(".")[0] == package.module and source is not package
        ]

    def edges(self, source: Source) -> Iterator[tuple[str, int]]:
        """The modules of this package that ``source`` imports when it is loaded."""
        for node in _loaded(source.tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = source.origin(node)
                names = [f"{origin}.{alias.name}" for alias in node.names]
                targets = [name if name in self.modules else origin for name in names]
            else:
                continue
            for target in dict.fromkeys(targets):
                if target in self.modules and target != source.module:
                    yield target, node.lineno


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join([PACKAGE, *parts])


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is loaded: no function bodies, no type-only imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _loaded(child)
