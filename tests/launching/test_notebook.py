"""A real notebook, run by a real kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
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

WAITING = """
import os, pathlib, time
import meshwright as mw

def wait():
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(60)

mw.launch(wait, 2)
"""
AGAIN = """
def rank():
    return int(os.environ["RANK"])

mw.launch(rank, 2)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_interrupt_button_ends_the_ranks_and_the_next_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat

    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code) for code in (WAITING, AGAIN)]
    )
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")

    def press() -> None:
        while len([*tmp_path.glob("pid-*")]) < 2:
            time.sleep(0.05)
        asyncio.run(client.km.provisioner.send_signal(signal.SIGINT))

    with client.setup_kernel(cwd=str(tmp_path)):
        button = threading.Thread(target=press, daemon=True)
        button.start()
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(notebook.cells[0], 0)
        client.execute_cell(notebook.cells[1], 1)
    assert said(notebook.cells[1]) == "[0, 1]"
    left = [path for path in tmp_path.glob("pid-*") if Path(f"/proc/{path.name[4:]}").exists()]
    assert not left
