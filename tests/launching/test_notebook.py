"""A real notebook, run by a real kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

ROOT = Path(__file__).parents[2]
FAILING = """
def fail():
    if connect().rank == 1:
        raise KeyError("no such token")
    connect().barrier()

mw.launch(fail, 2)
"""


def said(cell: Any) -> str:
    """What a cell shows, in plain text."""
    outputs = cell["outputs"]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    return "".join(texts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_example_trains_and_a_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own packages may warn of each other."""
    import nbformat

    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    failing = nbformat.v4.new_code_cell(FAILING, metadata={"tags": ["raises-exception"]})
    again = nbformat.v4.new_code_cell("mw.launch(lambda: width, 1)")
    notebook.cells += [failing, again]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    *_, launched, result, failed, last = notebook.cells
    lines = said(launched).splitlines()
    assert sorted(line.partition(" loss ")[0] for line in lines) == ["[rank 0]", "[rank 1]"]
    assert all(float(line.split()[-1]) < 0.01 for line in lines)
    assert said(result).startswith("(True, tensor([[1., 1.")
    (error,) = [each for each in failed["outputs"] if each["output_type"] == "error"]
    assert "rank 1 was first: it raised KeyError" in error["evalue"]
    assert "in fail" in error["evalue"]
    assert said(last) == "[8]"
