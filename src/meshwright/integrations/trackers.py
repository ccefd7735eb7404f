"""Sends metrics of a run to TensorBoard, Weights & Biases, MLflow, Trackio or your own tracker.

A tracker of your own is a class with the three methods of `Tracker`; name it as
``"package.module:Class"``. Only rank 0 creates it.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meshwright.errors import PlanError

Values = Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """A receiver of the numbers of one run."""

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        """Begin or resume the run that writes to ``folder``."""

    def log(self, step: int, values: Values) -> None:
        """Receive the numbers of one step."""

    def finish(self) -> None:
        """Send remaining values, and end the run."""


class TensorBoard:
    """Event files in the run's folder, ``tensorboard``."""

    def __init__(self) -> None:
        self._module = _load("tensorboard", "torch.utils.tensorboard")

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        self._writer = self._module.SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"    {key} = {value}" for key, value in flat(config).items())
        self._writer.add_text("config", rows)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, in the project ``WANDB_PROJECT``, by default "meshwright"."""

    def __init__(self) -> None:
        self._module = _load("wandb", "wandb")

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        self._run = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "meshwright"),
            name=folder.resolve().name,
            id=_kept(folder / "wandb.run", _new()),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at ``MLFLOW_TRACKING_URI``."""

    def __init__(self) -> None:
        self._module = _load("mlflow", "mlflow")

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        """Begin a run with the configuration as its parameters, or resume this folder's."""
        begun = folder / "mlflow.run"
        if begun.exists():
            self._module.start_run(run_id=begun.read_text(encoding="utf-8"))
            return
        run = self._module.start_run(run_name=folder.resolve().name)
        self._module.log_params(flat(config))
        _write(begun, run.info.run_id)

    def log(self, step: int, values: Values) -> None:
        self._module.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self._module.end_run()


class Trackio:
    """A run of Trackio, in the project "meshwright"."""

    def __init__(self) -> None:
        self._module = _load("trackio", "trackio")

    def start(self, folder: Path, config: Mapping[str, object]) -> None:
        name = _kept(folder / "trackio.run", f"{folder.resolve().name}-{_new()}")
        self._module.init(project="meshwright", name=name, config=dict(config), resume="allow")

    def log(self, step: int, values: Values) -> None:
        self._module.log(dict(values), step=step)

    def finish(self) -> None:
        self._module.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def tracker_of(name: str) -> Tracker:
    """Make the tracker called ``name``: one of `TRACKERS`, or ``"package.module:Class"``.

    Raises ``PlanError`` when it is unknown, is not a tracker, or needs a package that is missing.
    """
    kind: Any = TRACKERS.get(name)
    if kind is None:
        module, colon, attribute = name.partition(":")
        if not colon:
            known = ", ".join(TRACKERS)
            raise PlanError(
                f"unknown tracker {name!r}; expected {known}, or package.module:Class of your own"
            )
        kind = getattr(_load(module, module), attribute, None)
        if not callable(kind):
            raise PlanError(f"tracker {name!r}: expected a class there, found {kind!r}")
    made = kind()
    if not isinstance(made, Tracker):
        raise PlanError(
            f"tracker {name!r}: expected an object with start, log and finish, found "
            f"{type(made).__name__}"
        )
    return made


def flat(config: Mapping[str, object], before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def _kept(place: Path, new: str) -> str:
    """Return the run's name from the file ``place``, which a new run writes as ``new``.

    So a folder of the same name elsewhere is another run.
    """
    if not place.exists():
        _write(place, new)
    return place.read_text(encoding="utf-8")


def _write(place: Path, name: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(name, encoding="utf-8")


def _new() -> str:
    return uuid.uuid4().hex[:8]


def _load(package: str, module: str) -> Any:  # noqa: ANN401 - whatever it holds
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"pip install 'meshwright[{package}]'" if package in TRACKERS else "is it there?"
        raise PlanError(f"tracker {package!r} cannot be loaded: {error}; {advice}") from error
