"""Tiny runs for the tests of the main job: bodies for ranks, and the text they read."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from meshwright.checkpoint import latest, load_tensors
from meshwright.comm import connect
from support.internals.recipes import RunOutcome, TrainConfig, train
from support.internals.toml_source import read

CONFIG = """
[model]
layers = 2
heads = 2
dim = 16
context = 16

[data]
batch_size = 8
validation_windows = 6

[optimizer]
warmup_steps = 2

[run]
steps = 6
trace_steps = 2
"""


def write_text(folder: Path) -> Path:
    """A text of 20 kB that a tiny model can begin to learn."""
    # Ranks write it at the same time, and none may read what another has only begun.
    part = folder / f"text.{os.getpid()}"
    part.write_bytes(b"".join(b"%d + %d = %d\n" % (n, n % 7, n + n % 7) for n in range(1200)))
    return part.replace(folder / "text.txt")


def read_run(folder: Path, *overrides: str) -> TrainConfig:
    """The tiny configuration, its run in ``folder/run``, the text beside it."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    given = [f"data.path={text}", f"run.folder={folder / 'run'}", *overrides]
    has_model = any(each.startswith("model.factory") for each in overrides)
    config = "[data]" + CONFIG.partition("[data]")[2] if has_model else CONFIG
    return read(config, TrainConfig, source="tiny.toml", overrides=given)


def run_tiny(
    folder: Path, *overrides: str, tell: Callable[[str], None] = lambda line: None
) -> RunOutcome:
    """A whole tiny run on this rank."""
    world = connect()
    config = read_run(folder, *overrides)
    return train(config, world, tell if world.rank == 0 else lambda line: None)


def stop_in_step(folder: Path, step: int, *overrides: str) -> RunOutcome:
    """A run in which rank 1 alone is asked to stop, while ``step`` runs on rank 0."""
    world = connect()
    config = read_run(folder, *overrides)
    neighbor = int(world.gather_bytes(str(os.getpid()).encode(), label="process ids")[-1])

    def tell(line: str) -> None:
        if world.rank == 0 and line.startswith(f"step {step}/"):
            os.kill(neighbor, signal.SIGTERM)
            # The neighbor gets it while it waits for this rank, and not some steps later.
            time.sleep(0.2)

    return train(config, world, tell)


class FailingTracker:
    """A tracker that takes a step and loses its connection in the second."""

    told: ClassVar[list[int]] = []

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        """Begin."""
        assert folder.name == "run" and "config" in config

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers."""
        assert values["loss"] > 0 and values["memory/parameters"] > 0
        self.told.append(step)
        if step == 2:
            raise ConnectionError("no answer")

    def finish(self) -> None:
        """Be left out long since."""
        raise AssertionError("it had failed")


def losses(folder: Path) -> dict[int, float]:
    """The training losses of a run's metrics file by step."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def saved_tensors(folder: Path) -> dict[str, list[float]]:
    """Every tensor of a run's newest checkpoint, as numbers."""
    newest = latest(folder / "run" / "checkpoints")
    assert newest is not None
    return {name: tensor.tolist() for name, tensor in load_tensors(newest).tensors.items()}
