"""The house holds its rules, and each rule turns red when it is broken."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from architecture_rules import RULES, broken
from architecture_source import Tree

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"


@pytest.fixture(scope="module")
def house() -> Tree:
    return Tree(SOURCE)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_holds_the_rule(house: Tree, rule: str) -> None:
    violations = broken(rule, house)
    assert not violations, "\n".join([RULES[rule].__doc__ or "", *map(str, violations)])


def test_the_house_is_found(house: Tree) -> None:
    assert {"meshwright", "meshwright.errors", "meshwright.mesh"} <= house.modules.keys()


def _function(lines: int, name: str = "work", docstring: int = 0) -> str:
    text = '    """Say.\n' + "    more\n" * docstring + '    """\n' if docstring else ""
    return f"def {name}() -> None:\n" + text + "    x = 1\n" * (lines - 1)


def _plant(root: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text), encoding="utf-8")
    return Tree(root)


_HEAD = '"""A module."""\n'
_NAMED = _HEAD + "__all__ = []\n"

# (rule, the file where it must be seen, the tree)
PLANTED: list[tuple[str, str, dict[str, str]]] = [
    ("file_size", "plan.py", {"plan.py": "x = 1\n" * 501}),
    ("function_size", "plan.py", {"plan.py": _function(61)}),
    (
        "function_size",
        "plan.py",
        {"plan.py": "class A:\n" + textwrap.indent(_function(61), "    ")},
    ),
    (
        "function_p90",
        "plan.py",
        {"plan.py": "".join(_function(31 if i < 2 else 3, f"f{i}") for i in range(10))},
    ),
    # arrows: upwards, between siblings, to testing, through the package, of an unknown room
    ("arrows", "comm/failure.py", {"comm/failure.py": "from meshwright.composition import x\n"}),
    ("arrows", "comm/failure.py", {"comm/failure.py": "from ..data_parallel import unit\n"}),
    ("arrows", "pipelining/stage.py", {"pipelining/stage.py": "import meshwright.data_parallel\n"}),
    ("arrows", "data_parallel/unit.py", {"data_parallel/unit.py": "from meshwright import fsdp\n"}),
    ("arrows", "composition.py", {"composition.py": "from meshwright.testing import ranks\n"}),
    ("arrows", "testing/pool.py", {"testing/pool.py": "from meshwright.recipes import loop\n"}),
    ("arrows", "report/page.py", {"report/page.py": "from meshwright.comm import connect\n"}),
    ("arrows", "errors.py", {"errors.py": "from meshwright.axes import Axes\n"}),
    ("arrows", "gradients.py", {"gradients.py": "from meshwright import parallelize\n"}),
    (
        "arrows",
        "gradients.py",
        {
            "gradients.py": "import meshwright\n\ndef f() -> None:\n    meshwright.checkpoint.save()\n"
        },
    ),
    (
        "arrows",
        "gradients.py",
        {"gradients.py": "import importlib\nx = importlib.import_module('meshwright.recipes')\n"},
    ),
    ("arrows", "wishes.py", {"wishes.py": "x = 1\n"}),
    (
        "cycles",
        "comm/a.py",
        {
            "comm/a.py": "from meshwright.comm import b\n",
            "comm/b.py": "from meshwright.comm.c import x\n",
            "comm/c.py": "import meshwright.comm.a\n",
        },
    ),
    (
        "cycles",
        "comm/failure.py",
        {
            "comm/__init__.py": "from meshwright.comm.failure import x\n",
            "comm/failure.py": "from meshwright.comm import y\n",
        },
    ),
    # one door: by import, by attribute, by alias, by string
    ("one_door", "gradients.py", {"gradients.py": "import torch.distributed\n"}),
    ("one_door", "gradients.py", {"gradients.py": "import torch.distributed as dist\n"}),
    ("one_door", "gradients.py", {"gradients.py": "from torch import distributed as d\n"}),
    ("one_door", "gradients.py", {"gradients.py": "from torch.distributed import all_reduce\n"}),
    (
        "one_door",
        "gradients.py",
        {"gradients.py": "import torch\n\ndef f() -> None:\n    torch.distributed.barrier()\n"},
    ),
    (
        "one_door",
        "gradients.py",
        {
            "gradients.py": "import torch\nlib = torch\n\ndef f() -> None:\n    lib.distributed.barrier()\n"
        },
    ),
    (
        "one_door",
        "gradients.py",
        {"gradients.py": "import torch\nx = getattr(torch, 'distributed')\n"},
    ),
    (
        "one_door",
        "gradients.py",
        {
            "gradients.py": "from importlib import import_module as load\nx = load('torch.distributed')\n"
        },
    ),
    (
        "one_door",
        "gradients.py",
        {
            "gradients.py": "import torch\n\ndef f() -> None:\n    torch.ops._c10d_functional.wait()\n"
        },
    ),
    # peers: everywhere, comm included, and as strings
    ("no_peers", "comm/gloo.py", {"comm/gloo.py": "from torch.distributed import fsdp\n"}),
    (
        "no_peers",
        "comm/gloo.py",
        {"comm/gloo.py": "from torch.nn.parallel import DistributedDataParallel\n"},
    ),
    (
        "no_peers",
        "composition.py",
        {"composition.py": "from torch import nn\nX = nn.parallel.DistributedDataParallel\n"},
    ),
    ("no_peers", "composition.py", {"composition.py": "X = 'torch.distributed.pipelining'\n"}),
    (
        "no_peers",
        "composition.py",
        {"composition.py": "X = __import__('torch.distributed.tensor.parallel')\n"},
    ),
    ("no_pickle", "checkpoint/save.py", {"checkpoint/save.py": "import pickle\n"}),
    (
        "no_pickle",
        "checkpoint/save.py",
        {"checkpoint/save.py": "import torch\n\ndef f() -> None:\n    torch.save(1, 'x')\n"},
    ),
    (
        "no_pickle",
        "comm/failure.py",
        {
            "comm/failure.py": "import torch.distributed as dist\n\ndef f() -> None:\n"
            "    dist.all_gather_object([], 1)\n"
        },
    ),
    ("torch_free", "plan.py", {"plan.py": "import torch\n"}),
    ("torch_free", "schedule/actions.py", {"schedule/actions.py": "from torch import Tensor\n"}),
    (
        "function_imports",
        "plan.py",
        {"plan.py": "def f() -> None:\n    import json\n"},
    ),
    (
        "function_imports",
        "plan.py",
        {
            "plan.py": "from importlib import import_module\n\ndef f() -> None:\n    import_module('x')\n"
        },
    ),
    ("optional_imports", "comm/launch.py", {"comm/launch.py": "import rich\n"}),
    ("optional_imports", "plan.py", {"plan.py": "from tyro import cli\n"}),
    ("optional_imports", "cli.py", {"cli.py": "import pytest\n"}),
    ("module_names", "comm/utils.py", {"comm/utils.py": _NAMED}),
    ("module_names", "comm/_gloo_helpers.py", {"comm/_gloo_helpers.py": _NAMED}),
    ("module_names", "manager/__init__.py", {"manager/__init__.py": _NAMED}),
    (
        "module_names",
        "data_parallel/replicate.py",
        {
            "data_parallel/__init__.py": _HEAD + "__all__ = ['replicate']\n",
            "data_parallel/replicate.py": _NAMED,
        },
    ),
    ("public_names", "plan.py", {"plan.py": "__all__ = []\n"}),
    ("public_names", "plan.py", {"plan.py": _HEAD}),
    ("public_names", "plan.py", {"plan.py": _HEAD + "__all__ = ['Plan']\n"}),
    ("public_names", "plan.py", {"plan.py": _NAMED + "class Plan:\n    pass\n"}),
    (
        "public_names",
        "comm/__init__.py",
        {"comm/__init__.py": _NAMED + "from meshwright.comm.launch import launch\n"},
    ),
    ("module_state", "plan.py", {"plan.py": "cache = {}\n"}),
    ("module_state", "plan.py", {"plan.py": "import threading\nlock = threading.Lock()\n"}),
    ("module_state", "plan.py", {"plan.py": "_found: list[int] = []\n"}),
    ("module_state", "plan.py", {"plan.py": "class A:\n    pass\n\nONE = A()\n"}),
    (
        "module_state",
        "plan.py",
        {"plan.py": "X = 1\n\ndef f() -> None:\n    global X\n    X = 2\n"},
    ),
    ("module_state", "plan.py", {"plan.py": "X = {}\n\ndef f() -> None:\n    X['a'] = 2\n"}),
    ("module_state", "plan.py", {"plan.py": "X = []\n\ndef f() -> None:\n    X.append(2)\n"}),
    ("no_print", "recipes/loop.py", {"recipes/loop.py": "print('x')\n"}),
    ("annotated", "plan.py", {"plan.py": "def f(x) -> None: ...\n"}),
    ("annotated", "plan.py", {"plan.py": "def f(x: int): ...\n"}),
    ("annotated", "plan.py", {"plan.py": "def f(*x, **y: int) -> None: ...\n"}),
    ("annotated", "plan.py", {"plan.py": "class A:\n    def f(self, *, x) -> None: ...\n"}),
]


@pytest.mark.parametrize(
    ("rule", "path", "files"), PLANTED, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(PLANTED)]
)
def test_a_planted_violation_is_seen(
    tmp_path: Path, rule: str, path: str, files: dict[str, str]
) -> None:
    violations = broken(rule, _plant(tmp_path, files))
    assert path in {violation.path for violation in violations}
    assert str(violations[0]).startswith(f"{violations[0].path}:{violations[0].line}: [{rule}] ")


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in PLANTED} == set(RULES)


# What comes close to a violation and is none.
SOUND: dict[str, str] = {
    "__init__.py": '''
        """The package."""
        from importlib import import_module
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from meshwright.comm import connect
            from meshwright.plan import Plan
        __all__ = ["Plan", "connect"]
        def __getattr__(name: str) -> object:
            return getattr(import_module("meshwright.plan"), name)
        ''',
    "plan.py": '''
        """Plans; torch.distributed.fsdp is named in a docstring only."""
        import json
        from dataclasses import dataclass
        from meshwright.axes import Axes
        __all__ = ["Colour", "Plan"]
        NAMES = {"a": 1}
        @dataclass(frozen=True, slots=True)
        class Colour:
            """A colour."""
        RED = Colour()
        class Plan:
            """A plan."""
            axes: Axes
            def text(self, *values: int, **more: str) -> str:
                found = []
                found.append(NAMES["a"])
                return json.dumps(found)
        ''',
    "axes.py": '"""Axes."""\n__all__ = ["Axes"]\nclass Axes:\n    """Axes."""\n',
    "comm/__init__.py": (
        '"""Communication."""\nfrom meshwright.comm.process_groups import connect\n'
        '__all__ = ["connect"]\n'
    ),
    "comm/process_groups.py": '''
        """Groups."""
        import torch.distributed as dist
        __all__ = ["connect"]
        _registry = {}
        def connect() -> None:
            """Connect."""
            _registry["world"] = dist.group.WORLD
        ''',
    "data_parallel/__init__.py": (
        '"""Data parallel."""\nfrom .replicated import replicate\n__all__ = ["replicate"]\n'
    ),
    "data_parallel/replicated.py": '''
        """Replicas."""
        import torch
        from meshwright import __version__
        from meshwright.comm import connect
        __all__ = ["replicate"]
        def replicate(module: torch.nn.Module) -> str:
            """Replicate."""
            distributed = module.distributed
            connect()
            return f"{__version__} {distributed}"
        ''',
    "cli.py": '''
        """Commands."""
        import tyro
        __all__ = ["main"]
        def main() -> None:
            """Run."""
            import rich
            print(tyro, rich)
        ''',
}


@pytest.mark.parametrize("rule", RULES)
def test_sound_code_is_left_alone(tmp_path: Path, rule: str) -> None:
    assert broken(rule, _plant(tmp_path, SOUND)) == []


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    long_text = {"plan.py": _function(60, docstring=40)}
    assert broken("function_size", _plant(tmp_path, long_text)) == []
