"""The folder of a run: where it writes, what it resumes from, and its state as a checkpoint.

::

    runs/train-20260101-120000/
    ├── config.toml              the configuration with its overrides
    ├── run.json                 its hosts, backend and versions
    ├── metrics.jsonl            one object per step
    ├── checkpoints/
    │   └── step_00000300/       what `resume` takes
    ├── summary.json
    ├── timeline.json            a Chrome trace of the last steps
    └── report.html              all that, for a browser
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright import checkpoint
from meshwright.comm import Communicator
from meshwright.composition import Trainable
from meshwright.errors import CheckpointError, CheckpointMismatchError, PlanError
from meshwright.recipes.config import TrainConfig
from meshwright.sampling import Sampler
from meshwright.toml_source import plain

CHECKPOINTS = "checkpoints"
# Keys that do not affect the numbers and so may differ when a run resumes.
_FREE = ("data.path", "data.tokens", "model.hugging_face", "model.weights", "run.")
_BOUND = {"run.steps": " (the schedule of the learning rate depends on it)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of a run, and the checkpoint it starts from, if any."""

    path: Path
    checkpoint: Path | None

    @property
    def checkpoints(self) -> Path:
        """The folder in which checkpoints are saved."""
        return self.path / CHECKPOINTS


def choose_folder(config: TrainConfig, communicator: Communicator) -> RunFolder:
    """Decide on rank 0 where this run writes and what it resumes from; equal on all ranks.

    Claims the folder for this run. Raises ``PlanError`` when [run] folder and resume do not fit
    what is on the disk, ``CheckpointClaimedError`` when another run writes there.
    """
    answer = None
    if communicator.rank == 0:
        chosen = _choose(config)
        answer = [str(chosen.path), str(chosen.checkpoint or "")]
    path, start = communicator.gather_values(answer, label="run folder")[0]
    return RunFolder(path=Path(path), checkpoint=Path(start) if start else None)


def describe_run(
    config: TrainConfig, fingerprint: Mapping[str, str], model: str = ""
) -> dict[str, object]:
    """Describe, for JSON, what determines a run's numbers: configuration, fingerprints of the data.

    ``model`` is the `model_text` of a model's configuration file, or empty.
    """
    found: dict[str, object] = {"config": plain(config), "text": dict(fingerprint)}
    return {**found, "hugging_face": model} if model else found


def check_same_run(saved: object, run: Mapping[str, object], path: Path) -> None:
    """Raise ``CheckpointMismatchError`` when ``path`` was saved by a different run."""
    found = [
        f"{key} = {theirs} there, {ours} here{_BOUND.get(key, '')}"
        for key, theirs, ours in _differences(saved, json.loads(json.dumps(run)))
        if not key.startswith(_FREE) or key in _BOUND
    ]
    if found:
        raise CheckpointMismatchError(
            f"the checkpoint {path} belongs to another plan or run: {'; '.join(found)}; use its "
            "values, choose another [run] folder, or resume from it with the values given here: "
            "set [run] accept_changes = true"
        )


def look_ahead(config: TrainConfig, run: Mapping[str, object]) -> None:
    """Raise the mismatch that `restore_run` would raise if the run resumes; loads no tensors.

    It runs before any rank starts. Damaged and missing checkpoints are left to the ranks.
    """
    resume, folder = config.run.resume, config.run.folder
    if config.run.accept_changes or resume == "never" or (resume == "auto" and not folder):
        return
    named = Path(folder if resume == "auto" else resume)
    below = named / CHECKPOINTS
    path = checkpoint.latest(below) if below.is_dir() else named
    if resume == "auto" and path == named:
        return
    if path is not None and (saved := _saved_run(path)) is not None:
        check_same_run(saved, run, path)


def _saved_run(path: Path) -> object | None:
    extra = checkpoint.load(path).extra
    return extra.get("run") if isinstance(extra, dict) else None


def resume_hint(folder: Path, command: str) -> str:
    """Return how to resume the run in ``folder`` after a rank was killed, if anything was saved."""
    below = folder / CHECKPOINTS
    newest = checkpoint.latest(below) if below.is_dir() else None
    if newest is None:
        return f"no checkpoint had been saved in {folder}: see [run] save_every"
    return f"the last checkpoint is {newest}; resume with: {command} --resume {folder}"


def require_start(resume: str) -> None:
    """Raise ``PlanError`` when [run] resume names a folder that does not exist."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise PlanError(
            f"[run] resume = {resume}: expected auto, never, the folder of a run or a checkpoint, "
            "found no such folder"
        )


def require_free(target: Path) -> None:
    """Raise ``PlanError`` when the folder of [run] export exists."""
    if os.path.lexists(target):
        raise PlanError(
            f"[run] export = {target}: it exists, and exports never overwrite; move it away, or "
            "choose another folder"
        )
    require_folder(target, "export")


def require_folder(folder: Path, key: str = "folder") -> None:
    """Raise ``PlanError`` when ``folder`` cannot be created or written to."""
    standing = next((p for p in (folder, *folder.absolute().parents) if os.path.lexists(p)), folder)
    try:
        # Create something to find out: permission bits mean little to root or on odd file systems.
        os.rmdir(tempfile.mkdtemp(prefix=".meshwright-", dir=standing))
    except OSError as error:
        raise PlanError(
            f"[run] {key} = {folder}: expected a folder that exists or can be created, but in "
            f"{standing} nothing can be written: {error.strerror}; choose another [run] {key}"
        ) from error


def _choose(config: TrainConfig) -> RunFolder:
    resume, folder = config.run.resume, config.run.folder
    named = None if resume in ("auto", "never") else Path(resume)
    require_start(resume)
    if folder:
        path = Path(folder)
    else:
        path = fresh_folder(config) if named is None else home_of(named)
    require_folder(path)
    checkpoint.claim(path / CHECKPOINTS)
    if named is None:
        if resume == "never" and any((path / CHECKPOINTS).glob("step_*")):
            raise PlanError(
                f"[run] resume = never, but {path} holds checkpoints of an earlier run, which are "
                "never overwritten; choose another [run] folder, or resume = auto"
            )
        return RunFolder(path=path, checkpoint=checkpoint.latest(path / CHECKPOINTS))
    start = _named_start(named)
    # `latest` logs each checkpoint it skips, so the same folder is not searched twice.
    is_looked_through = path.absolute() == named.absolute()
    newest = start if is_looked_through else checkpoint.latest(path / CHECKPOINTS)
    if (
        newest is not None
        and checkpoint.read_manifest(newest).step > checkpoint.read_manifest(start).step
    ):
        raise PlanError(
            f"[run] resume = {resume}, but {path} holds a later checkpoint, {newest.name}, which "
            "would have to be overwritten; choose another [run] folder, or resume = auto"
        )
    return RunFolder(path=path, checkpoint=start)


def _named_start(named: Path) -> Path:
    """Return ``named`` if it is a checkpoint, or the newest checkpoint of the run ``named``."""
    if not (named / CHECKPOINTS).is_dir():
        return named
    newest = checkpoint.latest(named / CHECKPOINTS)
    if newest is None:
        raise PlanError(
            f"[run] resume = {named}: expected a complete checkpoint in {named / CHECKPOINTS}, "
            "found none; leave resume out to start anew"
        )
    return newest


def home_of(named: Path) -> Path:
    """Return the run folder: ``named`` itself, or the run that the checkpoint ``named`` is in."""
    if (named / CHECKPOINTS).is_dir():
        return named
    # A checkpoint is in checkpoints/ of its run, unless it was copied elsewhere.
    home = named.absolute().parent
    if home.name != CHECKPOINTS:
        raise CheckpointError(
            f"{named} is not in a run's {CHECKPOINTS} folder, so it does not say where to write; "
            "give [run] folder too"
        )
    return home.parent


def folder_of(config: TrainConfig) -> Path:
    """Return the folder that a run will write to; creates one if the configuration names none."""
    named = config.run.folder, config.run.resume
    match named:
        case "", "auto" | "never":
            return fresh_folder(config)
        case "", resume:
            return home_of(Path(resume))
    return Path(config.run.folder)


def fresh_folder(config: TrainConfig) -> Path:
    """Create a folder for a run that names none."""
    name = Path(config.origin.source).stem or "run"
    path = first = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    require_folder(path)
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):  # another run, started in the same second
            path.mkdir(parents=True)
            break
        path = first.with_name(f"{first.name}-{number}")
    return path


def _differences(first: object, second: object) -> Iterator[tuple[str, str, str]]:
    """List dotted key and both values wherever two JSON trees differ."""
    ours, theirs = dict(json_leaves(first)), dict(json_leaves(second))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if ours.get(key) != theirs.get(key):
            name = key.removeprefix("config.")
            yield name, ours.get(key, "nothing"), theirs.get(key, "nothing")


def json_leaves(tree: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of a JSON tree, as text, with its dotted key."""
    if isinstance(tree, Mapping):
        for name, inner in tree.items():
            yield from json_leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(tree)


def save_run(
    folder: RunFolder,
    trainable: Trainable,
    sampler: Sampler,
    run: Mapping[str, object],
    communicator: Communicator,
    keep_last: int,
    *,
    background: bool,
) -> Path | checkpoint.PendingSave:
    """Save everything needed to resume exactly; returns what `checkpoint.save` does.

    No generator is saved: each step seeds it from the run's seed, the step and the rank's share.
    """
    return checkpoint.save(
        folder.checkpoints,
        trainable.steps,
        model=trainable,
        data=sampler,
        extra={"run": json.loads(json.dumps(run))},
        random=False,
        keep_last=keep_last,
        background=background,
        communicator=communicator,
    )


def restore_run(
    path: Path,
    trainable: Trainable,
    sampler: Sampler,
    run: Mapping[str, object],
    *,
    accept_changes: bool,
) -> None:
    """Restore ``trainable`` and ``sampler`` from the checkpoint ``path``.

    Raises ``CheckpointMismatchError`` when it was saved by another run, unless ``accept_changes``,
    or does not fit the model; ``CheckpointDamagedError`` when its bytes are not those saved.
    """
    if (saved := _saved_run(path)) is None:
        raise CheckpointMismatchError(
            f"the checkpoint {path} was not saved by `meshwright train`: it holds no run; load it "
            "with checkpoint.load"
        )
    if not accept_changes:
        check_same_run(saved, run, path)
    try:
        checkpoint.load(path, model=trainable, data=None if accept_changes else sampler)
        if accept_changes:  # such as other data: the same position, in another order
            state = cast("Any", checkpoint.read_manifest(path).metadata["state"])
            sampler.move_to(state["data"]["position"])
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError) and not isinstance(error, CheckpointMismatchError):
            raise
        raise CheckpointMismatchError(
            f"the checkpoint {path} belongs to another model: "
            + " ".join(str(error).split())
            + "; use the [model] it was saved with"
        ) from error
