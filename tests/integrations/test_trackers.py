"""Trackers: what each of them is told, and what is said where one is not there."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import PlanError
from support.internals.integrations import TRACKERS, Tracker, flat, tracker_of

CONFIG = {"model": {"layers": 2}, "seed": 7}


class Recording(types.ModuleType):
    """A module whose functions, and the objects that they give, note every call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.info = types.SimpleNamespace(run_id="abc")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> Recording:
            self.calls.append((name, args, kwargs))
            return self

        return call


def told(monkeypatch: pytest.MonkeyPatch, name: str, module: str, folder: Path) -> Any:
    package = Recording(module)
    monkeypatch.setitem(sys.modules, module, package)
    tracker = tracker_of(name)
    tracker.start(folder, CONFIG)
    tracker.log(3, {"loss": 1.5})
    tracker.finish()
    return package.calls


def test_each_package_is_told_the_run_its_numbers_and_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run-1"
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert told(monkeypatch, "tensorboard", "torch.utils.tensorboard", run) == [
        ("SummaryWriter", (str(run / "tensorboard"),), {}),
        ("add_text", ("config", "    model.layers = 2\n    seed = 7"), {}),
        ("add_scalar", ("loss", 1.5, 3), {}),
        ("close", (), {}),
    ]
    begin, log, end = told(monkeypatch, "wandb", "wandb", run)
    assert begin[2] == {
        "project": "meshwright",
        "name": "run-1",
        "id": (run / "wandb.run").read_text(),
        "resume": "allow",
        "dir": str(run),
        "config": CONFIG,
    }
    assert (log, end) == (("log", ({"loss": 1.5},), {"step": 3}), ("finish", (), {}))
    assert told(monkeypatch, "mlflow", "mlflow", run) == [
        ("start_run", (), {"run_name": "run-1"}),
        ("log_params", ({"model.layers": 2, "seed": 7},), {}),
        ("log_metrics", ({"loss": 1.5},), {"step": 3}),
        ("end_run", (), {}),
    ]
    begin, log, end = told(monkeypatch, "trackio", "trackio", run)
    assert begin[2]["name"].startswith("run-1-") and begin[2]["config"] == CONFIG
    assert (log, end) == (("log", ({"loss": 1.5},), {"step": 3}), ("finish", (), {}))


def test_a_folder_goes_on_with_its_run_and_another_one_of_its_name_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for tracker, key in (("wandb", "id"), ("trackio", "name"), ("mlflow", "run_id")):
        first, again, other = [
            told(monkeypatch, tracker, tracker, tmp_path / parent / "run")
            for parent in ("a", "a", "b")
        ]
        if tracker == "mlflow":
            assert first[0] == other[0] == ("start_run", (), {"run_name": "run"})
            assert [name for name, *_ in again] == ["start_run", "log_metrics", "end_run"]
            assert again[0][2] == {"run_id": (tmp_path / "a" / "run" / "mlflow.run").read_text()}
        else:
            assert first[0][2][key] == again[0][2][key] != other[0][2][key]


class OfMine:
    """A tracker of a user."""

    def start(self, folder: Path, config: object) -> None:
        """Begin."""

    def log(self, step: int, values: object) -> None:
        """Take the numbers."""

    def finish(self) -> None:
        """End."""


def test_a_tracker_of_the_user_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_mine")
    vars(module)["OfMine"] = OfMine
    vars(module)["NoTracker"] = dict
    monkeypatch.setitem(sys.modules, "of_mine", module)
    assert isinstance(tracker_of("of_mine:OfMine"), Tracker)
    with pytest.raises(PlanError, match="expected an object with start, log and finish"):
        tracker_of("of_mine:NoTracker")
    with pytest.raises(PlanError, match="expected a class there, found None"):
        tracker_of("of_mine:Nothing")


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRACKERS:
        module = "torch.utils.tensorboard" if name == "tensorboard" else name
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(PlanError, match=rf"pip install 'meshwright\[{name}\]'"):
            tracker_of(name)
    with pytest.raises(PlanError, match="unknown tracker 'wandbb'; expected tensorboard, wandb"):
        tracker_of("wandbb")


def test_tables_become_dotted_keys() -> None:
    assert flat({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
