"""The example of the README is the file in examples/, and it trains."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.testing import Ranks

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "replicate.py"


def test_the_readme_shows_the_file() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    code = EXAMPLE.read_text().partition("from __future__ import annotations\n\n")[2]
    assert shown.group(1) == code


def test_the_example_trains_the_same_model_on_two_ranks(ranks: Ranks) -> None:
    def body() -> tuple[float, list[float]]:
        found = runpy.run_path(str(EXAMPLE))
        return found["loss"].item(), found["model"].weight.flatten().tolist()

    first, second = ranks(2, body, connected=False)
    assert max(first[0], second[0]) < 0.01
    assert first[1] == second[1]


@pytest.mark.slow
def test_torchrun_starts_the_example() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    # The ranks share one pipe and write the end of a line by itself: lines may run together.
    number = r"(-?\d+\.\d{6})"
    lines = re.findall(rf"rank (\d) of 2: loss {number}, weights {number}", done.stdout)
    assert {rank for rank, *_ in lines} == {"0", "1"}
    assert all(float(loss) < 0.01 for _, loss, _ in lines)
    assert len({weights for *_, weights in lines}) == 1


SHOWN = ("README.md", "docs/tensor_parallel.md", "examples/llama.py")


def commands() -> list[str]:
    """What README, docs and examples show of examples, each once; a line may go on in the next."""
    text = "\n".join((ROOT / file).read_text() for file in SHOWN).replace("\\\n", " ")
    found = re.findall(
        r"^(?:\.venv/bin/)?(torchrun .*|meshwright train examples/.*)", text, re.MULTILINE
    )
    ours = (" ".join(line.split()) for line in found if "examples/" in line)
    return list(dict.fromkeys(ours))


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_the_commands_shown_run_as_they_stand(line: str, tmp_path: Path) -> None:
    name, *words = shlex.split(line)
    if "llama.py" in line:
        pytest.importorskip("transformers")
    if name == "meshwright":  # a short run of its own
        (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 200)
        words = [str(tmp_path) if word == "~/texts" else word for word in words]
        words += ["--run.folder", str(tmp_path / "run"), "--run.steps=3", "--run.parity-steps=1"]
        words = ["-m", "meshwright", *words]
    else:
        words = ["-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
