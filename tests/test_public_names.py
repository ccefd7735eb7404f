"""What the library shows: its public names, and what it loads to show them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest

import meshwright

# Packages that a machine without development tools lacks.
DEVELOPMENT = (
    "codespell_lib",
    "hypothesis",
    "pytest",
    "rich",
    "ruff",
    "sphinx",
    "transformers",
    "tyro",
)
# The public names of this version: adding or removing one is a decision, made here too.
NAMES = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Plan",
    "__version__",
    "clip_grad_norm_",
    "connect",
    "declare_element_wise",
    "flat_groups",
    "fully_shard",
    "init_device_mesh",
    "launch",
    "own_matrices",
    "parallelize",
    "parallelize_module",
    "pipeline",
    "replicate",
}
# Started from a command, or by pytest: these may need what the library does not.
ENTRIES = (
    "meshwright.__main__",
    "meshwright.cli",
    "meshwright.recipes",
    "meshwright.testing.plugin",
)


def _modules() -> list[str]:
    found = pkgutil.walk_packages(meshwright.__path__, "meshwright.")
    return ["meshwright", *sorted(module.name for module in found)]


def _run(code: str) -> str:
    """What a fresh interpreter prints for ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    errors = vars(importlib.import_module("meshwright.errors")).values()
    named = {e.__name__ for e in errors if isinstance(e, type) and issubclass(e, Exception)}
    assert set(meshwright.__all__) == NAMES | named


@pytest.mark.parametrize("name", _modules())
def test_every_public_name_exists_and_is_described(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    assert set(listed or ()) <= set(dir(module))
    for public in listed or [known for known in vars(module) if not known.startswith("_")]:
        value = getattr(module, public)
        if not (getattr(value, "__module__", "") or "torch").startswith("meshwright"):
            continue  # torch's own: described by torch, or by the line under its name
        # Elsewhere a function may say it by its signature.
        if inspect.isclass(value) or (listed and inspect.isroutine(value)):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"
        for own, each in vars(value).items() if listed and inspect.isclass(value) else ():
            if not own.startswith("_") and isinstance(each, FunctionType | property):
                assert inspect.getdoc(getattr(value, own)), f"{name}.{public}.{own} has none"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"meshwright.*'nothing'"):
        meshwright.nothing  # noqa: B018


def test_modules_are_attributes_and_nothing_else_is_shown() -> None:
    shown = _run("import meshwright; print(*dir(meshwright))").split()
    modules = {name.split(".")[1] for name in _modules()[1:]} - {"__main__"}
    assert {name for name in shown if not name.startswith("__")} == {
        *(name for name in meshwright.__all__ if name != "__version__"),
        *modules,
    }
    looked_up = "import meshwright as mw; print(mw.checkpoint.save.__name__, mw.fsdp.__name__)"
    assert _run(looked_up) == "save meshwright.fsdp"


def test_the_package_starts_without_torch() -> None:
    assert _run("import sys, meshwright; print('torch' in sys.modules)") == "False"


def test_plans_and_errors_load_no_torch() -> None:
    code = "import sys, meshwright as m; m.Plan, m.PlanError; print('torch' in sys.modules)"
    assert _run(code) == "False"


@pytest.mark.slow
def test_the_library_needs_neither_a_compiler_nor_development_tools() -> None:
    """Neither the public names nor sharding load a compiler; all but the command, its recipes and
    the test plugin loads where development tools are missing."""
    names = [name for name in _modules() if not name.startswith(ENTRIES)]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({DEVELOPMENT!r}))\n"
        "import meshwright as m; m.parallelize, m.replicate, m.FullyShardedDataParallel\n"
        "import torch; m.comm.connect('gloo'); m.fully_shard(torch.nn.Linear(2, 2))\n"
        "print('torch._dynamo' in sys.modules)\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('loaded')"
    )
    assert _run(code) == "False\nloaded"


def test_meshes_are_those_of_torch() -> None:
    mesh = importlib.import_module("meshwright.mesh")
    device_mesh = importlib.import_module("torch.distributed.device_mesh")
    assert mesh.DeviceMesh is device_mesh.DeviceMesh
    assert meshwright.init_device_mesh is device_mesh.init_device_mesh


DOCUMENTED = (
    "meshwright",
    "meshwright.checkpoint",
    "meshwright.comm",
    "meshwright.compiler",
    "meshwright.composition",
    "meshwright.data",
    "meshwright.data_parallel",
    "meshwright.data_parallel.comm_hooks",
    "meshwright.context_parallel",
    "meshwright.expert_parallel",
    "meshwright.fsdp",
    "meshwright.losses",
    "meshwright.mesh",
    "meshwright.pipelining",
    "meshwright.plan",
    "meshwright.planner",
    "meshwright.randomness",
    "meshwright.report",
    "meshwright.schedule",
    "meshwright.tensor_parallel",
    "meshwright.testing",
    "meshwright.testing.simulated",
    "meshwright.transfer",
)
"""The packages of which the reference shows every public name."""
BETWEEN_ROOMS = {
    "meshwright.cli",
    "meshwright.comm.shared_memory",
    "meshwright.doctor",
    "meshwright.gradients",
    "meshwright.data_parallel.ReductionSettings",
    "meshwright.data_parallel.Replica",
    "meshwright.data_parallel.ReplicateOptions",
    "meshwright.data_parallel.batch_norms",
}
"""Packages and names that rooms have for each other."""


def shown_in_the_reference() -> set[str]:
    folder = Path(__file__).parents[1] / "docs" / "reference"
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md")))
    found = set(re.findall(r"auto(?:class|data|function):: meshwright[\w.]*\.(\w+)", text))
    found |= set(re.findall(r"`meshwright[\w.]*\.(\w+)`", text))  # those that have a sentence
    for name, options in re.findall(r"automodule:: ([\w.]+)\n((?: {3}.*\n)*)", text):
        listed = re.search(r":members:(.*(?:\n {6,}.*)*)", options)
        assert listed is not None, name
        members = [member.strip() for member in listed[1].split(",") if member.strip()]
        module = importlib.import_module(name)
        hidden = re.search(r":exclude-members: (.*)", options)
        every = set(members or getattr(module, "__all__", vars(module)))
        found |= every.difference(hidden[1].split(", ") if hidden else ())
    return found


@pytest.mark.parametrize("package", DOCUMENTED)
def test_the_reference_shows_every_public_name(package: str) -> None:
    public = set(importlib.import_module(package).__all__) - {"__version__"}
    missing = public - shown_in_the_reference()
    assert not {f"{package}.{name}" for name in missing} - BETWEEN_ROOMS


def test_every_package_is_in_the_reference_or_between_rooms() -> None:
    found = [importlib.import_module(name) for name in _modules()]
    packages = {m.__name__ for m in found if hasattr(m, "__path__") and getattr(m, "__all__", ())}
    assert packages <= {*DOCUMENTED, *BETWEEN_ROOMS}


def test_what_the_pages_import_and_name_is_in_the_reference() -> None:
    root = Path(__file__).parents[1]
    files = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "examples").glob("*.*")]
    texts = "\n".join(f.read_text() for f in files)
    used = set(re.findall(r"`meshwright\.[a-z_.]+\.(\w+)", texts))
    for names in re.findall(r"from meshwright[.a-z_]* import ([\w, ]+)", texts):
        used |= {name.partition(" as ")[0].strip() for name in names.split(",")}
    packages = {name.rpartition(".")[2] for name in _modules()}
    assert len(used) > 30
    assert not used - packages - shown_in_the_reference() - {"NAME"}


@pytest.mark.parametrize(
    "door",
    [
        meshwright.fully_shard,
        meshwright.replicate,
        meshwright.DistributedDataParallel.__init__,
    ],
    ids=lambda door: door.__qualname__,
)
def test_every_parameter_of_a_wrapper_is_named_and_described(door: Callable[..., object]) -> None:
    assert inspect.isfunction(door)
    parameters = inspect.signature(door).parameters.values()
    assert not [each for each in parameters if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    described = re.findall(r":param (\w+): \S", inspect.getdoc(door) or "")
    assert described == [each.name for each in parameters if each.name != "self"]


def test_ddp_has_the_positions_and_defaults_of_torch() -> None:
    theirs = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    (mine, other) = (
        {name: (each.kind, each.default) for name, each in inspect.signature(of).parameters.items()}
        for of in (meshwright.DistributedDataParallel, theirs)
    )
    assert list(mine.items())[: len(other)] == list(other.items())


def test_a_composable_function_knows_the_state_of_a_module() -> None:
    home = "meshwright.data_parallel"
    replicated = importlib.import_module(f"{home}.replicas.replicated")
    sharded = importlib.import_module(f"{home}.sharded_modules.sharded")
    assert vars(meshwright.replicate)["state"] is replicated.replica_state
    assert vars(meshwright.fully_shard)["state"] is sharded.sharded_state
