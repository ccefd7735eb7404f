"""Small source trees: violations that each rule must see, and sound code that none may blame."""

from __future__ import annotations

import textwrap

from support.architecture import table

__all__ = ["PLANTED", "SOUND", "long_function"]

Files = dict[str, str]


def long_function(lines: int, name: str = "work", docstring: int = 0) -> str:
    """A function of ``lines`` lines, and as many of docstring as asked."""
    text = '    """Say.\n' + "    more\n" * docstring + '    """\n' if docstring else ""
    return f"def {name}() -> None:\n" + text + "    x = 1\n" * (lines - 1)


LISTED = '"""Rooms.\n\nBottom-up:\n\n    a  the first\n"""\n'

# `rule  file  source`, where ` | ` ends a line of the source.
_LINES = """
arrows            comm/failures/failure.py      from meshwright.composition import x
arrows            comm/failures/failure.py      from ...data_parallel import unit
arrows            pipelining/stage.py           import meshwright.data_parallel
arrows            data_parallel/shards/unit.py  from meshwright import fsdp
arrows            composition.py                from meshwright.testing import ranks
arrows            testing/pool.py               from meshwright.recipes import loop
arrows            report/page.py                from meshwright.comm import connect
arrows            errors.py                     from meshwright.axes import Axes
arrows            gradients.py                  from meshwright import parallelize
arrows            gradients.py                  import meshwright | meshwright.checkpoint.save()
arrows            gradients.py                  import importlib | importlib.import_module('meshwright.cli')
arrows            wishes.py                     x = 1
one_door          gradients.py                  import torch.distributed
one_door          gradients.py                  import torch.distributed as dist
one_door          gradients.py                  from torch import distributed as d
one_door          gradients.py                  from torch.distributed import all_reduce
one_door          gradients.py                  import torch | torch.distributed.barrier()
one_door          gradients.py                  import torch | lib = torch | lib.distributed.barrier()
one_door          gradients.py                  import torch | x = getattr(torch, 'distributed')
one_door          gradients.py                  import torch | torch.ops._c10d_functional.wait()
one_door          gradients.py                  from importlib import import_module as m | m('torch.distributed')
no_peers          comm/c10d/gloo.py             from torch.distributed import fsdp
no_peers          comm/c10d/gloo.py             import torch.distributed as d | d.pipelining.pipeline()
no_peers          comm/c10d/gloo.py             from torch.nn.parallel import DistributedDataParallel
no_peers          composition.py                from torch import nn | X = nn.parallel.DistributedDataParallel
no_peers          composition.py                X = 'torch.distributed.pipelining'
no_peers          composition.py                __import__('torch.distributed.tensor.parallel')
no_pickle         checkpoint/save.py            import pickle
no_pickle         checkpoint/save.py            import torch | torch.save(1, 'x')
no_pickle         comm/failures/failure.py      import torch.distributed as d | d.all_gather_object([], 1)
private_torch     gradients/norm.py                      import torch | torch._foreach_add_([], 1)
private_torch     gradients/norm.py                      import torch | engine = torch.autograd | engine._profiler_enabled()
private_torch     gradients/norm.py                      from torch.utils._pytree import tree_map
private_torch     gradients/norm.py                      import importlib | importlib.import_module('torch._dynamo')
private_torch     gradients/norm.py                      NAME = 'torch._dynamo.config'
private_torch     gradients/norm.py                      def f(x: object) -> object: return x._local_tensor
private_torch     gradients/norm.py                      def f(x: object) -> object: return getattr(x, '_saved_self')
private_torch     gradients/norm.py                      def f(x: object, y: str) -> object: return getattr(x, f'_global{y}', {})
private_torch     gradients/norm.py                      def f(x: object) -> bool: return hasattr(x, '_in_backward_optimizers')
private_torch     gradients/norm.py                      def f(x: object) -> None: setattr(x, '_orig_mod', 1)
private_torch     gradients/norm.py                      PLACE = '_orig_mod'
private_torch     gradients/norm.py                      NAME = '_reset_parameters' if PLACE else 'reset_parameters'
private_torch     gradients/norm.py                      import torch | x = vars(torch)['_assert_async']
private_torch     gradients/norm.py                      def f(x: object) -> object: return x._raw_saved_mat1
private_torch     gradients/norm.py                      def f(x: object) -> object: return x.f_locals['optims']
private_torch     gradients/norm.py                      from meshwright.torch_internals.distributed import Work
said_devices      gradients/norm.py             import torch | x = torch.zeros(2, dtype=torch.int64)
said_devices      gradients/norm.py             from torch import tensor as made | x = made(1)
torch_free        plan.py                       import torch
torch_free        schedule/actions.py           from torch import Tensor
torch_free        planner/search.py             from meshwright.planner.traced import trace_model
function_imports  plan.py                       def f() -> None: import json
function_imports  plan.py                       import importlib | def f() -> None: importlib.import_module('x')
optional_imports  comm/groups/launch.py         import rich
optional_imports  plan.py                       from tyro import cli
optional_imports  cli/main.py                   import pytest
module_names      comm/utils.py                 x = 1
module_names      comm/_gloo_helpers.py         x = 1
module_names      manager/__init__.py           x = 1
public_names      plan.py                       __all__ = []
public_names      plan.py                       'A plan.'
public_names      layout.py                     'A.' | __all__ = ['f'] | def f() -> None: pass
public_names      plan.py                       'A plan.' | __all__ = ['Plan']
public_names      torch_internals/trees.py      'Trees.' | __all__ = ['f'] | def f() -> None: pass
public_names      plan.py                       'A plan.' | __all__ = [] | class Plan: pass
public_names      comm/__init__.py              'A.' | from meshwright.comm.x import y | __all__ = []
module_state      plan.py                       cache = {}
module_state      plan.py                       import threading | lock = threading.Lock()
module_state      plan.py                       _found: list[int] = []
module_state      plan.py                       class A: x: int = 0 | ONE = A()
module_state      plan.py                       def f() -> None: global X; X = 2
module_state      plan.py                       X = {} | def f() -> None: X['a'] = 2
module_state      plan.py                       X = [] | def f() -> None: X.append(2)
no_print          recipes/loop.py               print('x')
annotated         plan.py                       def f(x) -> None: ...
annotated         plan.py                       def f(x: int): ...
annotated         plan.py                       def f(*x, **y: int) -> None: ...
annotated         plan.py                       class A: |     def f(self, *, x) -> None: ...
"""

_MANY: list[tuple[str, str, Files]] = [
    ("file_size", "plan.py", {"plan.py": "x = 1\n" * (table.FILE_LINES + 1)}),
    ("room_size", "plan.py", {"plan.py": "x = 1\n" * (table.ROOM_LINES["plan"] + 1)}),
    *(
        (
            "private_torch",
            "gradients/norm.py",
            {
                "torch_internals/tensors.py": f"def saved(x: object, y: str) -> object: {says}",
                "gradients/norm.py": "READS = {'Mm': ('_raw_saved_mat1',)}\n_raw_saved_mat1 = 1",
            },
        )
        for says in ("return x._raw_saved_mat1", "return getattr(x, f'_raw_saved_{y}')")
    ),
    *(
        (
            "own_unions",
            "fsdp/a.py",
            {
                "data_parallel/a.py": "class Exposure: ...\nclass Flat(Exposure): ...",
                "fsdp/b.py": "from meshwright.data_parallel import a\nclass Whole(a.Flat): ...",
                "fsdp/a.py": says,
            },
        )
        for says in (
            "def f(x: object) -> bool: return isinstance(x, int | Exposure)",
            "def f(x: object) -> bool: return isinstance(x, (b.Whole, int))",
            "def f(x: object) -> int:\n    match x:\n        case Flat(): return 1",
        )
    ),
    (
        "class_names",
        "plan.py",
        {"layout.py": "class Piece: ...", "plan.py": "def f() -> None:\n    class Piece: ..."},
    ),
    ("listings", "comm/__init__.py", {"comm/__init__.py": "", "comm/a.py": ""}),
    (
        "listings",
        "comm/a.py",
        {
            "comm/__init__.py": LISTED.replace("first", "first\n    b  the second"),
            "comm/a.py": "import meshwright.comm.b",
            "comm/b.py": "",
        },
    ),
    (
        "listings",
        "comm/__init__.py",
        {
            "comm/__init__.py": LISTED,
            "comm/a.py": "",
            "comm/b/__init__.py": "",
        },
    ),
    (
        "listings",
        "comm/__init__.py",
        {"comm/__init__.py": LISTED},
    ),
    ("function_size", "plan.py", {"plan.py": long_function(table.FUNCTION_LINES + 1)}),
    (
        "function_size",
        "plan.py",
        {
            "plan.py": "class A:\n"
            + textwrap.indent(long_function(table.FUNCTION_LINES + 1), "    ")
        },
    ),
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
        "comm/failures/failure.py",
        {
            "comm/__init__.py": "from meshwright.comm.failures.failure import x\n",
            "comm/failures/failure.py": "from meshwright.comm import y\n",
        },
    ),
    (
        "module_names",
        "data_parallel/replicate.py",
        {
            "data_parallel/__init__.py": "__all__ = ['replicate']\n",
            "data_parallel/replicate.py": "x = 1\n",
        },
    ),
]


def _planted() -> list[tuple[str, str, Files]]:
    rows = [line.split(maxsplit=2) for line in _LINES.strip().splitlines()]
    return _MANY + [
        (rule, path, {path: source.replace(" | ", "\n") + "\n"}) for rule, path, source in rows
    ]


# (rule, the file where it must be seen, the tree)
PLANTED = _planted()

# What comes close to a violation and is none.
SOUND: Files = {
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
        __all__ = ["Color", "Plan", "Rule"]
        NAMES = {"a": 1}
        @dataclass(frozen=True, slots=True)
        class Color:
            """A color."""
        RED = Color()
        class Rule:
            """Calls nothing its own."""
            def __call__(self) -> None: ...
        rule = Rule()
        class Plan:
            """A plan."""
            axes: Axes
            def text(self, *values: int, **more: str) -> str:
                found = []
                found.append(NAMES["a"])
                return json.dumps(found)
        ''',
    "axes.py": '"""Axes."""\nclass Axes:\n    """Axes."""\n',
    "comm/__init__.py": '''
        """Communication.

        Bottom-up:

            groups  the state of a process
        """
        from meshwright.comm.groups.registry import connect
        __all__ = ["connect"]
        ''',
    "comm/groups/__init__.py": '''
        """Groups.

        Bottom-up:

            registry  all of it
        """
        __all__ = []
        ''',
    "comm/groups/registry.py": '''
        """Groups."""
        import torch.distributed as dist
        _registry = {}
        def connect() -> None:
            """Connect."""
            _registry["world"] = dist.group.WORLD
        ''',
    "data_parallel/__init__.py": '''
        """Data parallel."""
        from .replicated import replicate
        __all__ = ["replicate"]
        ''',
    "data_parallel/replicas/replicated.py": '''
        """Replicas."""
        import torch
        from meshwright import __version__
        from meshwright.comm import connect
        def replicate(module: torch.nn.Module) -> str:
            """Replicate."""
            distributed = module.distributed
            connect()
            torch.zeros(2, device="cpu").new_zeros(1)
            return f"{__version__} {distributed}"
        ''',
    "cli/main.py": '''
        """Commands."""
        import tyro
        def main() -> None:
            """Run."""
            import rich
            print(tyro, rich)
        ''',
}
