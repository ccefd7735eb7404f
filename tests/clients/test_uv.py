"""`uv sync` and `uv run`: the project in an environment of theirs, by the versions of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from support.constraints import pinned

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def versions(lines: Iterable[str]) -> dict[str, str]:
    """Versions by names, as they are compared."""
    pairs = (line.split("==") for line in lines if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_a_clone_is_synced_and_runs(tmp_path: Path) -> None:
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    uv = shutil.which("uv", path=places)
    if uv is None:
        pytest.skip("uv is not installed")
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, files):
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)

    foreign = ("PYTHON", "VIRTUAL_ENV", "PYTEST")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [uv, *words],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not done.returncode, f"{words}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout

    run("sync", "--quiet")
    assert (clone / "uv.lock").is_file()
    found, ours = versions(run("pip", "freeze").splitlines()), versions(pinned())
    shared = found.keys() & ours.keys()
    assert {"torch", "pytest", "ruff", "jinja2"} <= shared
    assert {name: found[name] for name in shared} == {name: ours[name] for name in shared}
    assert "usage: meshwright" in run("run", "meshwright", "--help").lower()
    assert " passed" in run("run", "pytest", "-q", "tests/test_constraints.py")
