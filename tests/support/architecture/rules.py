"""The rules of the architecture: each reads a source tree and yields what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import support.architecture.table as table
from support.architecture.source import PACKAGE, Function, Source, Tree, is_under

__all__ = ["RULES", "Violation", "broken"]


class Violation(NamedTuple):
    """One place that breaks one rule."""

    rule: str
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


Found = Iterator[tuple[str, int, str]]
Rule = Callable[[Tree], Found]


def file_size(tree: Tree) -> Found:
    """A file holds at most 1,000 lines."""
    for source in tree.sources:
        lines = source.text.count("\n")
        if lines > table.FILE_LINES:
            yield source.path, lines, f"{lines} lines; at most {table.FILE_LINES}: split it"


def room_size(tree: Tree) -> Found:
    """A room has at most its lines in `ROOM_LINES`, which each reduction lowers."""
    rooms: dict[str, list[Source]] = {}
    for source in tree.sources:
        rooms.setdefault(source.room, []).append(source)
    for room, sources in rooms.items():
        lines = sum(source.text.count("\n") for source in sources)
        if room and lines > (most := table.ROOM_LINES.get(room, 0)):
            yield sources[0].path, 1, f"the room {room} has {lines} lines; at most {most}"


_ROW = re.compile(r"^    (\w+)(  |$)", re.MULTILINE)


def listings(tree: Tree) -> Found:
    """The docstring of a folder lists all it holds; no file imports one that is listed after it."""
    for source in tree.sources:
        if not source.is_package or not source.room:
            continue
        _, _, rest = (ast.get_docstring(source.tree) or "").partition("Bottom-up:\n\n")
        listed = [name for name, _ in _ROW.findall(rest.partition("\n\n")[0])]
        found = {child.module.rpartition(".")[2] for child in tree.children(source)}
        for name in sorted(found - set(listed)):
            yield source.path, 1, f"{name!r} is not in the listing under 'Bottom-up:'"
        for name in sorted(set(listed) - found):
            yield source.path, 1, f"the listing has {name!r}, which the folder does not hold"
        rows = [f"{source.module}.{name}" for name in listed]
        for number, name in enumerate(rows, 1):
            child = tree.modules.get(name, source)
            for target, line in [] if child.is_package else tree.edges(child):
                if target in rows[number:] and not tree.modules[target].is_package:
                    yield child.path, line, f"{target} is listed after it: list it before"


def function_length(function: Function) -> int:
    """Lines of a function without its docstring and decorators."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


def function_size(tree: Tree) -> Found:
    """A function holds at most 100 lines."""
    for source in tree.sources:
        for function in source.functions:
            length = function_length(function)
            if length > table.FUNCTION_LINES:
                limit = f"at most {table.FUNCTION_LINES}"
                yield source.path, function.lineno, f"{function.name} has {length} lines; {limit}"


def arrows(tree: Tree) -> Found:
    """A room imports only the rooms that its row of the table allows."""
    for source in tree.sources:
        if not source.room:
            continue
        if source.room not in table.ALLOWED:
            yield (
                source.path,
                1,
                f"room {source.room!r} has no row in tests/support/architecture/table.py",
            )
            continue
        allowed = table.ALLOWED[source.room] | {source.room}
        if source.path in table.WITH_TORCH:
            allowed |= table.ALLOWED["composition"] | {"composition"}
        for name, line in source.uses:
            if not name.startswith(PACKAGE + "."):
                continue
            room = name.split(".")[1]
            if room.startswith("__") or room in allowed:
                continue
            if any(source.path == p and w.startswith(name) for p, w in table.WAYS_ROUND):
                continue
            known = room in table.ALLOWED
            reason = "an arrow against the architecture" if known else "import it from its own room"
            yield source.path, line, f"{source.room} uses {name}: {reason}"


def cycles(tree: Tree) -> Found:
    """No module imports itself through others."""
    reach = {source.module: {target for target, _ in tree.edges(source)} for source in tree.sources}
    for source in tree.sources:
        for target, line in tree.edges(source):
            seen, waiting = set(), [target]
            while waiting:
                module = waiting.pop()
                if module not in seen:
                    seen.add(module)
                    waiting.extend(reach[module])
            if source.module in seen:
                yield source.path, line, f"{source.module} imports {target}, which imports it back"


def _uses_under(
    tree: Tree, prefixes: Iterable[str], may: Callable[[Source], bool]
) -> Iterator[tuple[Source, int, str]]:
    """Uses of names below ``prefixes`` in files that may not, once for each line and prefix."""
    for source in tree.sources:
        if may(source):
            continue
        found = {
            (line, prefix)
            for name, line in source.uses
            for prefix in prefixes
            if is_under(name, prefix)
        }
        for line, prefix in sorted(found):
            yield source, line, prefix


def one_door(tree: Tree) -> Found:
    """Only comm/ and mesh.py touch torch.distributed, by import or by attribute."""
    for source, line, prefix in _uses_under(
        tree, table.C10D, lambda source: any(is_under(source.module, r) for r in table.C10D_ROOMS)
    ):
        yield source.path, line, f"{prefix} outside comm/: go through a Communicator"


def no_peers(tree: Tree) -> Found:
    """What Meshwright replaces is never imported, and named as a string in one file alone."""
    for source, line, prefix in _uses_under(tree, table.PEERS, lambda _: False):
        yield source.path, line, f"{prefix} is a peer: only benchmarks and tests may use it"
    for source in tree.sources:
        if source.path in table.NAMES_PEERS:
            continue
        for text, line in source.strings:
            if any(is_under(text, prefix) for prefix in table.PEERS):
                yield source.path, line, f"the string {text!r} names a peer"


def no_pickle(tree: Tree) -> Found:
    """Nothing is saved, loaded or sent in a format that runs code when it is read."""
    for source, line, prefix in _uses_under(
        tree,
        table.PICKLE,
        lambda source: source.room in table.PICKLE_ROOMS or source.path in table.PICKLE_FILES,
    ):
        yield source.path, line, f"{prefix} runs code when it reads: use safetensors or JSON"


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__") and part != "_"


def private_torch(tree: Tree) -> Found:
    """What torch keeps private is used in torch_internals alone.

    That is what this room says, and any private name that nothing in the library has made.
    """
    room = [source for source in tree.sources if source.room == table.PRIVATE_ROOM]
    others = [source for source in tree.sources if source.room != table.PRIVATE_ROOM]
    known = {part for source in room for part in _private_parts(source)}
    begins = tuple(use.name for source in room for use in source.prefixes if _is_private(use.name))
    own = table.OF_OTHERS.union(*(source.defined for source in others))
    for source in others:
        strings = () if source.path in table.NAMES_PEERS else source.dotted_strings
        for name, line in sorted({*source.uses, *strings}):
            if is_under(name, "torch") and any(map(_is_private, name.split("."))):
                yield source.path, line, f"{name} is private to torch: use {table.PRIVATE_ROOM}"
            for door, rooms in table.PRIVATE_DOORS.items():
                if is_under(name, door) and not any(is_under(source.module, r) for r in rooms):
                    yield source.path, line, f"{door} is for {' and '.join(rooms)} alone"
        said = {*source.foreign_attributes, *source.prefixes}
        for name, line in sorted(said.union(source.strings)):
            if not name.isidentifier() or not _is_private(name) or PACKAGE in name:
                continue
            is_strange = (name, line) in said | source.single_strings and name not in own
            if is_strange or name in known or name.startswith(begins):
                yield source.path, line, f"{name} of torch's objects: use {table.PRIVATE_ROOM}"
        for node in source.nodes:
            match node:
                case ast.Subscript(value=ast.Attribute(attr="f_locals")):
                    yield source.path, node.lineno, f"f_locals[...]: use {table.PRIVATE_ROOM}"


def _private_parts(source: Source) -> Iterator[str]:
    """The private names in what a file uses, and in its strings; any room may name operators."""
    for name, _ in (*source.uses, *source.foreign_attributes, *source.strings):
        if is_under(name, "torch.ops"):
            continue
        yield from (part for part in name.split(".") if part.isidentifier() and _is_private(part))


def said_devices(tree: Tree) -> Found:
    """A tensor says where it is made: a default device of the user's is not for the library's."""
    for source in tree.sources:
        for name, call in source.calls if source.path not in table.ON_DEFAULT_DEVICE else ():
            package, _, function = name.partition(".")
            is_silent = not {word.arg for word in call.keywords} & {"device", None}
            if package == "torch" and function in table.FACTORIES and is_silent:
                yield source.path, call.lineno, f"{name} without device=: the host's, or the data's"


def own_unions(tree: Tree) -> Found:
    """No isinstance on our own unions: what differs between their classes is a method."""
    bases = {
        node.name: {_last(base) for base in node.bases}
        for source in tree.sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    members: set[str] = set()
    while more := {n for n, b in bases.items() if n in table.UNIONS or b & members} - members:
        members |= more
    for source in tree.sources:
        for node in source.nodes:
            match node:
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    parts = ast.walk(kinds)
                case ast.MatchClass(cls=kinds):
                    parts = ast.walk(kinds)
                case _:
                    continue
            told = {_last(p) for p in parts if isinstance(p, ast.Name | ast.Attribute)} & members
            for name in sorted(told):
                yield source.path, node.lineno, f"it is asked for {name}: give the union a method"


def class_names(tree: Tree) -> Found:
    """No two classes have one name."""
    known: dict[str, str] = {}
    for source in tree.sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                first = known.setdefault(node.name, f"{source.path}:{node.lineno}")
                if first != f"{source.path}:{node.lineno}":
                    yield source.path, node.lineno, f"{node.name} is a class of {first}, too"


def torch_free(tree: Tree) -> Found:
    """The rooms that describe hold values only and start without torch."""

    def may(source: Source) -> bool:
        return source.room not in table.TORCH_FREE or source.path in table.WITH_TORCH

    needs = [f"{PACKAGE}.{path[:-3].replace('/', '.')}" for path in table.WITH_TORCH]
    lazily = _uses_under(tree, needs, lambda source: source.is_package or may(source))
    for source, line, name in (*_uses_under(tree, ("torch",), may), *lazily):
        yield source.path, line, f"{source.room} describes: it must not need {name}"


def function_imports(tree: Tree) -> Found:
    """Imports stand at the top, but for optional dependencies and the lazy package."""
    for source in tree.sources:
        for function in source.functions:
            if source.is_package and function.name == "__getattr__":
                continue
            for node in ast.walk(function):
                for name in _imports_of(source, node):
                    if name.split(".")[0] not in table.OPTIONAL:
                        yield source.path, node.lineno, f"{function.name} imports {name} inside"


def _imports_of(source: Source, node: ast.AST) -> Iterator[str]:
    """Names that a statement imports, also by a literal string."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (name for *_, name in source.imported(node))
    elif isinstance(node, ast.Call) and _last(node.func) in {"import_module", "__import__"}:
        yield from (str(value.value) for value in node.args[:1] if isinstance(value, ast.Constant))


def optional_imports(tree: Tree) -> Found:
    """The library loads where optional and development packages are missing."""
    for source in tree.sources:
        allowed = table.OPTIONAL_ROOMS.get(source.room, frozenset())
        for node in ast.iter_child_nodes(source.tree):
            for name in _imports_of(source, node):
                package = name.split(".")[0]
                if package in table.OPTIONAL - allowed:
                    yield (
                        source.path,
                        node.lineno,
                        f"{package} may be missing: import it where used",
                    )


def module_names(tree: Tree) -> Found:
    """A module is named for its idea, and never like a public name of its package."""
    for source in tree.sources:
        package, _, name = source.module.rpartition(".")
        banned = table.BANNED_WORDS & set(name.split("_"))
        if banned:
            yield source.path, 1, f"{name!r} says {sorted(banned)[0]!r}, not what the file holds"
        owner = tree.modules.get(package)
        if owner is not None and name in (all_of(owner) or ()):
            yield (
                source.path,
                1,
                f"{package} has a public name {name!r}: loading the module hides it",
            )


def all_of(source: Source) -> tuple[str, ...] | None:
    """The literal ``__all__`` of a module, None when there is none."""
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return tuple(ast.literal_eval(node.value))  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None


def _bound(source: Source) -> dict[str, str]:
    """Top-level names and what each is: ours, foreign or submodule."""
    found: dict[str, str] = {}
    for node in _top_level(source.tree.body):
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = "defined"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for local, _, name in source.imported(node):
                found[local] = "ours" if name.startswith(PACKAGE + ".") else "foreign"
        else:
            found.update(dict.fromkeys(_assigned(node), "constant"))
    return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top of a module, also under ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _top_level([*node.body, *handlers, *node.orelse, *node.finalbody])


def _assigned(node: ast.stmt) -> Iterator[str]:
    """Names that an assignment binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def public_names(tree: Tree) -> Found:
    """Every module has a docstring; what is public is listed once, in ``__all__`` of its folder.

    Names of a module that other files may use have no underscore, which says it all; only modules
    that users import by their own path list them. Those that pass torch's names on list these.
    """
    for source in tree.sources:
        if ast.get_docstring(source.tree) is None:
            yield source.path, 1, "no docstring: say in one sentence what the module holds"
        names = all_of(source)
        path = source.path.rpartition(f"{PACKAGE}/")[2]
        lists = source.is_package or path in table.PUBLIC_FILES
        passes_on = source.room == table.PRIVATE_ROOM
        if lists != (names is not None) and not (passes_on and names):
            yield source.path, 1, "no literal __all__" if lists else "__all__ says what names say"
        if names is None:
            continue
        bound = _bound(source)
        for name in names:
            if name not in bound:
                yield source.path, 1, f"__all__ lists {name!r}, which does not exist"
            elif passes_on and bound[name] != "foreign":
                yield source.path, 1, "__all__ says what names say"
        if passes_on:
            continue
        counted = {"defined", "ours"} if source.is_package else {"defined"}
        for name, kind in bound.items():
            if kind in counted and not name.startswith("_") and name not in names:
                yield source.path, 1, f"{name!r} is public by its name but not in __all__"


_CONTAINERS = (
    {"Counter", "OrderedDict", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
    | {"bytearray", "defaultdict", "deque", "dict", "list", "set"}
    | {"ContextVar", "Event", "Lock", "Queue", "RLock", "local"}
)
_CHANGERS = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop"} | {
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def module_state(tree: Tree) -> Found:
    """Nothing at the top of a module changes while the process runs."""
    living = _living_classes(tree)
    for source in tree.sources:
        if source.path in table.STATE_FILES:
            continue
        holders: set[str] = set()
        for node in _top_level(source.tree.body):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            is_living = isinstance(node.value, ast.Call) and _last(node.value.func) in living
            if not is_living and not _is_container(node.value):
                continue
            for name in _assigned(node):
                holders.add(name)
                if is_living or (name != "__all__" and name != name.upper()):
                    yield source.path, node.lineno, f"{name} can change: hold it in an object"
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield source.path, node.lineno, f"global {', '.join(node.names)}"
            for name in _changed(node):
                if name in holders - {"__all__"}:
                    yield source.path, node.lineno, f"{name} is changed after the module is loaded"


_VALUES = {"Enum", "IntEnum", "NamedTuple", "StrEnum"}


def _living_classes(tree: Tree) -> set[str]:
    """Names of the classes whose objects can change: they have fields and are not frozen."""
    found: set[str] = set()
    for source in tree.sources:
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef) or _VALUES & {_last(base) for base in node.bases}:
                continue
            frozen = any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)
            if not frozen and any(_is_field(part) for part in ast.walk(node)):
                found.add(node.name)
    return found


def _is_field(node: ast.AST) -> bool:
    """Whether a part of a class declares or sets an attribute of its objects."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return True
        case ast.ClassDef(body=body):
            return any(isinstance(statement, ast.AnnAssign) for statement in body)
    return False


def _last(expression: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(expression).split(".")[-1]


def _is_container(value: ast.expr) -> bool:
    """Whether an expression makes an object that can change."""
    if isinstance(value, ast.Call):
        return _last(value.func) in _CONTAINERS
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literals)


def _changed(node: ast.AST) -> Iterator[str]:
    """Names whose object a statement or call changes in place."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            yield name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
            if attr in _CHANGERS:
                yield name


def no_print(tree: Tree) -> Found:
    """Only the command line prints."""
    for source in tree.sources:
        if source.room == table.CONSOLE_ROOM:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "builtins.print"}:
                yield (
                    source.path,
                    node.lineno,
                    "print outside cli: use logging, or return the text",
                )


def annotated(tree: Tree) -> Found:
    """Every argument and every return is annotated."""
    for source in tree.sources:
        for function in source.functions:
            spec = function.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            missing = [
                argument.arg
                for argument in arguments
                if argument is not None
                and argument.annotation is None
                and argument.arg not in {"self", "cls"}
            ]
            missing += ["return"] if function.returns is None else []
            if missing:
                told = ", ".join(missing)
                yield source.path, function.lineno, f"{function.name} does not annotate: {told}"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        file_size,
        room_size,
        listings,
        function_size,
        arrows,
        cycles,
        one_door,
        no_peers,
        no_pickle,
        private_torch,
        said_devices,
        own_unions,
        class_names,
        torch_free,
        function_imports,
        optional_imports,
        module_names,
        public_names,
        module_state,
        no_print,
        annotated,
    )
}


def broken(name: str, tree: Tree) -> list[Violation]:
    """What breaks one rule in a tree, in order of file and line."""
    found = {Violation(name, *violation) for violation in RULES[name](tree)}
    return sorted(found, key=lambda violation: (violation.path, violation.line, violation.message))
