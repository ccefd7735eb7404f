"""The wheel, installed where there is no repository."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.wheel import ROOT, built, environment, run

pytestmark = pytest.mark.slow


def test_what_is_in_wheel_and_sdist(tmp_path: Path) -> None:
    wheel, sdist = built(tmp_path)
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(opened.read(metadata))
        example = opened.read("meshwright/recipes/example.toml")
    assert example == (ROOT / "examples/train.toml").read_bytes()
    assert "meshwright/py.typed" in names
    sources = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    for field in ("Summary", "Author", "License-Expression", "Keywords", "Requires-Python"):
        assert told[field], field
    assert len(told.get_all("Classifier") or ()) > 5
    assert "# Meshwright" in str(told.get_payload())
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "src/meshwright/recipes/example.toml"} <= inside
    assert {"SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CITATION.cff"} <= inside


def test_the_packaged_example_trains_and_the_doctor_looks(tmp_path: Path) -> None:
    environment(tmp_path)
    where = run("python", "-c", "import meshwright; print(meshwright.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path / "venv"))
    assert "torch" in run("python", "-m", "meshwright", "doctor", cwd=tmp_path)
    (tmp_path / "text.py").write_bytes(bytes(range(256)) * 400)
    small = ["--run.steps=3", "--run.parity-steps=1", "--axes.replicate", "2"]
    text = ["--data.path", "text.py", "--run.folder", "run"]
    said = run("meshwright", "train", "example", *small, *text, cwd=tmp_path)
    assert "finished at step 3 of 3 on 2 ranks" in said
    assert (tmp_path / "run/report.html").exists()
