"""The versions that `uv` installs are those that pip installs."""

from __future__ import annotations

import tomllib

from support.constraints import ROOT, pinned


def test_constraints_of_uv_are_those_of_the_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["constraint-dependencies"] == pinned()
