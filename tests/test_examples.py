"""Examples train the same model on two ranks as on one; files for engines say what these take."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from meshwright.comm import connect
from meshwright.testing import Ranks
from support.internals.recipes import RunOutcome, read_config, train
from support.recipes.runs import CONFIG, write_text

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


# ------------------------------------------------------------------------------------- programs


def trained(
    ranks: Ranks, count: int, folder: Path, *words: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The last loss of each rank of an example, and the weights of all ranks, whole."""

    def body() -> tuple[float, dict[str, torch.Tensor]]:
        os.chdir(folder)
        sys.argv = [*words]
        found = runpy.run_path(str(EXAMPLES / words[0]))
        model: nn.Module = found["stage"].submod if "stage" in found else found["model"]
        losses = found.get("losses", [found.get("loss")])
        loss = sum(losses) / len(losses) if losses else torch.tensor(torch.nan)
        state = model.state_dict()
        return loss.item(), {n: getattr(t, "full_tensor", t.clone)() for n, t in state.items()}

    found = ranks(count, body, connected=False)
    weights = {name: tensor for _, own in found for name, tensor in own.items()}
    assert all(
        torch.equal(tensor, weights[name]) for _, own in found for name, tensor in own.items()
    )
    return [loss for loss, _ in found], weights


def test_the_example_of_the_readme_trains_one_model(ranks: Ranks, tmp_path: Path) -> None:
    losses, weights = trained(ranks, 2, tmp_path, "replicate.py")
    assert max(losses) < 0.01
    torch.testing.assert_close(weights["weight"], torch.ones(1, 8), rtol=0.05, atol=0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["shard.py", "tensor.py", "pipeline.py"])
def test_an_example_trains_on_two_ranks_as_on_one(ranks: Ranks, tmp_path: Path, name: str) -> None:
    _, alone = trained(ranks, 1, tmp_path, name)
    losses, weights = trained(ranks, 2, tmp_path, name)
    assert 0 < max(loss for loss in losses if loss == loss) < 0.1
    assert weights.keys() == alone.keys()
    for key, weight in alone.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-3, atol=1e-4)


def test_the_own_loop_stops_and_goes_on_with_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, alone = trained(ranks, 1, tmp_path, "own_loop.py", "whole", "40")
    trained(ranks, 2, tmp_path, "own_loop.py", "parts", "17")
    losses, weights = trained(ranks, 1, tmp_path, "own_loop.py", "parts", "40")
    assert 0 < losses[0] < 1
    for key, weight in alone.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_example_of_hugging_face_is_loaded_by_it(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def body() -> tuple[float, float]:
        os.chdir(tmp_path)
        sys.argv = ["hugging_face.py", "exported"]
        found = runpy.run_path(str(EXAMPLES / "hugging_face.py"))
        return found["loss"].item(), found["same"].item()

    for loss, same in ranks(2, body, connected=False, timeout=240):
        assert loss < 4.8  # log(128) is 4.85
        assert abs(loss - same) < 1e-5
    assert (tmp_path / "exported/config.json").exists()


def run_of(name: str, folder: Path, *overrides: str) -> RunOutcome:
    """A run of a configuration of examples/ on this rank."""
    given = [f"run.folder={folder / 'run'}", *overrides]
    return train(read_config(EXAMPLES / name, given), connect(), lambda line: None)


def test_the_example_of_an_own_model_trains(ranks: Ranks, tmp_path: Path) -> None:
    outcome = ranks(2, run_of, "own_model.toml", tmp_path)[0]
    assert "replicate=2 equals one process over 20 steps in float64" in outcome.parity
    assert outcome.validation_loss is not None and outcome.validation_loss < 0.03


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_example_of_a_configuration_of_hugging_face_trains(
    ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    options = (f"run.export={tmp_path / 'out'}", "run.steps=8", "data.max_bytes=500000")
    outcome = ranks(4, run_of, "hugging_face.toml", tmp_path, *options, timeout=300)[0]
    assert "shard=2, tensor=2 equals one process over 5 steps in float64" in outcome.parity
    assert (tmp_path / "out/config.json").exists() and outcome.is_finished


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_without_its_arguments_says_its_usage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever an example reads arguments, a check that ends with one line stands before it."""
    text = path.read_text()
    if "sys.argv" not in text:
        return
    assert f"examples/{path.name}" in re.findall(r'sys.exit\("(usage: .*)"\)', text)[0]
    reads = re.search(r"= .*sys\.argv\[", text)
    assert reads is not None
    assert text.index("usage: ") < reads.start()
    if path.name in ("own_loop.py", "hugging_face.py", "llama.py"):
        monkeypatch.setattr(sys, "argv", [path.name])
        with pytest.raises(SystemExit, match="usage: torchrun"):
            runpy.run_path(str(path))


# ------------------------------------------------------------------------------------- engines

STRINGS = {"type": "array", "items": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 1}
# The fields of Kubeflow Trainer's v1alpha1 that a job of ours has use for; others are refused.
TRAINJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"},
        "kind": {"const": "TrainJob"},
        "metadata": {
            "type": "object",
            "required": ["generateName"],
            "properties": {"generateName": {"type": "string", "pattern": "^[a-z][-a-z0-9]*$"}},
        },
        "spec": {
            "type": "object",
            "required": ["runtimeRef", "trainer"],
            "additionalProperties": False,
            "properties": {
                "runtimeRef": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"const": "torch-distributed"}},
                },
                "trainer": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "image": {"type": "string"},
                        "command": STRINGS,
                        "args": STRINGS,
                        "numNodes": COUNT,
                        "numProcPerNode": COUNT,
                        "resourcesPerNode": {"type": "object", "required": ["limits"]},
                    },
                },
            },
        },
    },
}


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def words_after(line: str, word: str) -> list[str]:
    """The words of a shell's line that follow ``word``."""
    words = shlex.split(line.replace("\\\n", " "))
    return words[words.index(word) + 1 :]


def check_options(words: list[str]) -> None:
    """Raise for options that `meshwright train` does not have."""
    assert words[0] == "train"
    given = [
        f"{name[2:].replace('-', '_')}={value}"
        for name, value in zip(words[2::2], words[3::2], strict=True)
    ]
    config = read_config(str(EXAMPLES / "train.toml"), given)
    assert config.run.folder


def test_the_job_of_kubeflow_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    job = load("kubernetes/trainjob.yaml")
    jsonschema.validate(job, TRAINJOB)
    trainer = job["spec"]["trainer"]
    assert trainer["command"][:3] == ["torchrun", "--no-python", "meshwright"]
    check_options([*trainer["command"][3:], *trainer["args"]])


def test_the_task_of_skypilot() -> None:
    task = load("skypilot.yaml")
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    assert task["num_nodes"] == 2
    check_options(words_after(task["run"], "meshwright"))
    assert set(re.findall(r"\$(\w+)", task["run"])) == {
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_GPUS_PER_NODE",
        "SKYPILOT_NODE_IPS",
    }


def test_the_task_of_dstack() -> None:
    task = load("dstack.yml")
    assert set(task) == {"type", "name", "nodes", "python", "commands", "resources"}
    assert (task["type"], task["nodes"]) == ("task", 2)
    check_options(words_after(task["commands"][-1], "meshwright"))
    assert set(re.findall(r"\$(\w+)", task["commands"][-1])) == {
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_GPUS_PER_NODE",
        "DSTACK_MASTER_NODE_IP",
    }


def test_the_script_of_slurm_is_a_script_and_starts_ranks_by_srun() -> None:
    script = (EXAMPLES / "slurm.sbatch").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.+))?$", script, re.MULTILINE))
    assert options["signal"] == "USR1@300"
    assert {"requeue", "nodes", "ntasks-per-node"} <= set(options)
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    check_options(words_after(line, "meshwright"))


@pytest.mark.parametrize("name", ["monarch_tryout.py", "ray_train.py", "submitit_run.py"])
def test_what_an_example_imports_of_ours_is_there(name: str) -> None:
    """And it loads, where the package is installed that it is for."""
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    missing: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                known = hasattr(module, alias.name)
                assert known or importlib.util.find_spec(f"{node.module}.{alias.name}"), alias.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            missing |= {
                n.split(".")[0]
                for n in names
                if n and not importlib.util.find_spec(n.split(".")[0])
            }
    assert missing <= {"monarch", "ray", "submitit"}
    if not missing:
        spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ----------------------------------------------------------------------------- whole runs


def written(folder: Path) -> Path:
    """A tiny configuration of two ranks, and its text."""
    write_text(folder)
    start = f"[axes]\nreplicate = 2\n{CONFIG}"
    (folder / "my.toml").write_text(start.replace("[data]\n", "[data]\npath = 'text.txt'\n"))
    return folder / "my.toml"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """What a process of a run gets, without what another launcher has set."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "PET_"))
    }
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return {**kept, **own, **variables}


def command(folder: Path) -> Path:
    """A program `meshwright` that runs this source tree."""
    program = folder / "meshwright"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.slow
def test_two_agents_of_torchrun_on_one_host(tmp_path: Path) -> None:
    """As on two machines: the arguments of torchrun in `PET_*`, as Kubeflow sets them."""
    written(tmp_path), command(tmp_path)
    pet = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29713",
    }
    words = ["--no-python", "meshwright", "train", "my.toml", "--run.folder", "run"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=tmp_path,
            env=environment(tmp_path, **pet, PET_NODE_RANK=str(number)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "step 6/6" in said[0]
    assert "on 2 ranks" in said[0]


def steps(folder: Path, number: int, *options: str) -> subprocess.Popen[str]:
    """A task of srun."""
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    return subprocess.Popen(
        [str(folder / "meshwright"), "train", "my.toml", "--run.folder", "run", *options],
        cwd=folder,
        env=environment(folder, **slurm),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stopped(folder: Path, *options: str) -> str:
    """Run both tasks until they take steps, and ask them for the end; the words of the first."""
    metrics = folder / "run" / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    tasks = [steps(folder, number, *options) for number in range(2)]
    until = time.monotonic() + 240
    while not metrics.exists() or metrics.stat().st_size <= before:
        assert time.monotonic() < until
        time.sleep(0.05)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    said = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "stopped on request" in said[0]
    return said[0]


@pytest.mark.slow
def test_slurms_signal_saves_and_ends_with_0_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    written(tmp_path), command(tmp_path)
    options = ["--run.steps=100000", "--run.check_parity=false", "--run.log_every=1000"]
    assert "resumed from" not in stopped(tmp_path, *options)
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert "resumed from" in stopped(tmp_path, *options)
