"""The bridge to Ray Train, with a stand-in for Ray; tests/clients has the real one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.testing import Ranks
from support.internals.integrations import ray


class Checkpoint:
    """A folder, as Ray keeps it."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path


def stand_in(reports: list[Any], kept: Checkpoint | None = None) -> None:
    """Put modules with the names that the bridge imports in the place of Ray's."""
    configs = ("FailureConfig", "RunConfig", "ScalingConfig")
    train: Any = ModuleType("ray.train")
    train.__dict__.update(
        {name: lambda **given: given for name in configs},
        Checkpoint=Checkpoint,
        get_checkpoint=lambda: kept,
        report=lambda metrics, checkpoint: reports.append((metrics, checkpoint)),
    )
    torch: Any = ModuleType("ray.train.torch")
    torch.TorchTrainer = lambda loop, **given: SimpleNamespace(loop=loop, **given)
    root: Any = ModuleType("ray")
    root.train, train.torch = train, torch
    sys.modules |= {"ray": root, "ray.train": train, "ray.train.torch": torch}


def test_rank_0_gives_the_folder_that_all_have_saved_to(ranks: Ranks) -> None:
    def body() -> tuple[Mapping[str, object], str | None]:
        reports: list[Any] = []
        stand_in(reports)
        ray.report({"loss": 1.5}, Path("/runs/step_00000003"))
        ((metrics, checkpoint),) = reports
        return metrics, checkpoint and checkpoint.path

    found = ranks(2, body)
    assert found == [({"loss": 1.5}, "/runs/step_00000003"), ({"loss": 1.5}, None)]


def test_the_latest_checkpoint_is_a_folder_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # put back at the end
    stand_in([])
    with ray.latest_checkpoint() as folder:
        assert folder is None
    stand_in([], Checkpoint(str(tmp_path)))
    with ray.latest_checkpoint() as folder:
        assert folder == tmp_path


def test_a_trainer_connects_before_the_loop(ranks: Ranks) -> None:
    def body() -> tuple[list[Any], dict[str, Any]]:
        stand_in([])
        seen: list[Any] = []
        made = ray.trainer(seen.append, (1, 2), config={"a": 1}, storage=Path("/runs"), failures=3)
        made.loop({"a": 1})
        return seen, {name: value for name, value in vars(made).items() if name != "loop"}

    ((seen, given),) = ranks(1, body, connected=False)
    assert seen == [{"a": 1}]
    assert given == {
        "train_loop_config": {"a": 1},
        "scaling_config": {"num_workers": (1, 2), "use_gpu": False},
        "run_config": {
            "name": None,
            "storage_path": "/runs",
            "failure_config": {"max_failures": 3},
        },
    }
