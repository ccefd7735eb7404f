"""What README and docs show runs as it stands; the README's example is the file in examples/."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright import tensor_parallel
from meshwright.axes import KNOWN_AXES
from meshwright.cli import main
from meshwright.comm import communicator
from meshwright.integrations.trackers import Tracker
from meshwright.pipelining import PipelineStage, Schedule1F1B
from meshwright.plan import Plan
from meshwright.sampling import Sampler
from meshwright.testing import Ranks
from support.recipes.runs import CONFIG, write_text

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


def table_rows() -> list[list[str]]:
    """The cells of each row of the table of what works."""
    table = (ROOT / "README.md").read_text().partition("## What works now")[2]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[0][:40])
def test_a_row_of_the_table_names_what_is_there(row: list[str]) -> None:
    part, on_cpus, on_gpus = row
    assert on_cpus.startswith("works")
    assert on_gpus.startswith(("simulated", "not run", "not yet"))
    for text in re.findall(r"`([^`]+)`", part):
        for word in re.findall(r"^meshwright ([a-z ]+)", text):
            command = "cli_checkpoint" if word.startswith("checkpoint ") else "cli"
            assert f'"{word}": ' in (ROOT / f"src/meshwright/{command}.py").read_text(), text
        if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)*", text) and text not in KNOWN_AXES:
            assert exists(text), text


def exists(dotted: str) -> bool:
    """Look ``dotted`` up as a module, or as a public name of the library or of torch."""
    if dotted.startswith("meshwright."):
        return importlib.util.find_spec(dotted) is not None
    homes = (meshwright, tensor_parallel, torch)
    return any(hasattr(home, dotted.removeprefix("torch.")) for home in homes)


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of one page of docs."""
    text = (ROOT / "docs" / page).read_text()
    return [
        code
        for of, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
        if of == language
    ]


def test_the_code_of_the_performance_page_runs(ranks: Ranks, tmp_path: Path) -> None:
    of_a_run, of_a_tracker, of_a_pipeline = blocks("performance.md", "python")

    def body() -> list[int]:
        os.chdir(tmp_path)
        world = communicator()
        stage = PipelineStage(nn.Linear(2, 2), world.rank, world.size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.MSELoss())

        def step(x: torch.Tensor, target: torch.Tensor) -> None:
            kwargs = {"target": target} if stage.is_last else {}
            schedule.step(*((x,) if stage.is_first else ()), **kwargs)

        names: dict[str, Any] = {"schedule": SimpleNamespace(step=step)}
        names |= {"x": torch.ones(4, 2), "y": torch.ones(4, 2), "communicator": communicator}
        exec(of_a_tracker, names)
        assert isinstance(names["Tracker"](), Tracker)
        exec(of_a_run.replace("...  #", "communicator().barrier()  #"), names)
        events = [len(names["timer"].timeline(world.rank).events)]
        exec(of_a_pipeline, names)
        return [*events, len(names["timeline"].events)]

    for of_a_rank, of_all in ranks(2, body):
        assert of_all > of_a_rank > 0
    assert {file.name for file in tmp_path.iterdir()} == {"step.html", "step.json"}


def test_the_tutorial_trains_one_model_in_each_of_its_ways(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    one, several, sharded, planned = blocks("tutorial.md", "python")

    def weights(model: nn.Module) -> list[torch.Tensor]:
        state = model.state_dict().values()
        return [getattr(each, "full_tensor", lambda each=each: each)() for each in state]

    def body() -> list[list[torch.Tensor]]:
        made, loop = several.split("mw.replicate(model)", 1)
        found = []
        for middle in ("mw.replicate(model)", sharded):
            names: dict[str, Any] = {}
            exec(made + middle + loop, names)
            found.append(weights(names["model"]))
        names = {}
        exec(made, names)
        names["data"] = torch.randn(4096, 8)
        exec(planned.replace("clip_norm = 1.0", ""), names)
        found.append([*names["trainable"].weights().values()])
        return found

    alone: dict[str, Any] = {}
    exec(one, alone)
    assert float(capsys.readouterr().out.split()[-1]) < 0.5
    for found in ranks(4, body, connected=False)[0]:
        for mine, theirs in zip(weights(alone["model"]), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-4)


def test_every_name_on_the_page_for_users_of_others_is_there() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    dotted = set(re.findall(r"`((?:meshwright|torch)\.[\w.]+)", page))
    assert len(dotted) > 25
    for name in sorted(dotted):
        assert resolves(name), name
    for line in page.splitlines():
        cells = line.strip("|").split("|")
        if "under the same names" in line or "`meshwright.tensor_parallel`" in line:
            (home,) = re.findall(r"`(meshwright\.[a-z_]+)`(?!; )", cells[1])[:1]
            theirs = re.findall(r"`(?:torch\.[\w.]+\.)?(\w+)`", cells[0])
            assert all(hasattr(importlib.import_module(home), name) for name in theirs[1:]), line
    (plan,) = blocks("coming_from.md", "toml")
    Plan.from_toml(plan).check(4)


def resolves(dotted: str) -> bool:
    """Look ``dotted`` up: modules as far as they go, then attributes."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of torch, for its own
                found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[count:])
    return False


@pytest.mark.slow
def test_the_command_for_several_machines_starts_the_main_job_on_one(tmp_path: Path) -> None:
    (line,) = (code for code in blocks("several_machines.md", "") if "meshwright train" in code)
    write_text(tmp_path)
    start = f"[axes]\nreplicate = 2\n{CONFIG}"
    (tmp_path / "my.toml").write_text(start.replace("[data]\n", "[data]\npath = 'text.txt'\n"))
    (tmp_path / "meshwright").write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    (tmp_path / "meshwright").chmod(0o755)
    here = {"FIRST_MACHINE:29500": "localhost:0", "--nnodes 2": "--nnodes 1", "node 8": "node 2"}
    for shown, given in here.items():
        assert shown in line
        line = line.replace(shown, given).replace("\\\n", " ")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 6/6" in done.stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_code_and_the_commands_of_the_checkpoints_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "folder": "torchs"}
    names["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    names |= {"sampler": Sampler(64, 8, seed=1), "step": 120}
    for code in blocks("checkpoints.md", "python"):
        exec(code, names)
    assert (names["step"], names["best"]) == (120, 0.25)
    for line in "".join(blocks("checkpoints.md", "shell")).splitlines():
        assert main(shlex.split(line)[1:]) == int(" diff " in line), line
    assert "0.weight" in capsys.readouterr().out
