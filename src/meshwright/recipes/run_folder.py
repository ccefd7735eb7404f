"""The folder of a run: where it writes, what it resumes from, and its state as a checkpoint.

::

    runs/train-20260101-120000/
    ├── config.toml              the configuration with its overrides
    ├── metrics.jsonl            one object a step
    ├── checkpoints/
    │   └── step_00000300/       what `resume` takes
    ├── summary.json
    ├── timeline.json            a Chrome trace of the last steps
    └── report.html              curves and timeline, for a browser
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from meshwright import checkpoint
from meshwright.comm import Communicator
from meshwright.composition import Trainable
from meshwright.errors import CheckpointError, CheckpointMismatchError, PlanError
from meshwright.recipes.config import TrainConfig
from meshwright.recipes.text import ByteText
from meshwright.sampling import Sampler
from meshwright.toml_source import plain

CHECKPOINTS = "checkpoints"
_FINGERPRINT_BYTES = 64 * 2**20

# Keys that decide nothing about the numbers, so that they may differ after a resumption.
_FREE = ("data.path", "run.")
_BOUND = ("run.steps",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of a run and the checkpoint it starts from, if any."""

    path: Path
    checkpoint: Path | None

    @property
    def checkpoints(self) -> Path:
        """The folder in which checkpoints are saved."""
        return self.path / CHECKPOINTS


def choose_folder(config: TrainConfig, communicator: Communicator) -> RunFolder:
    """Decide on rank 0 where this run writes and what it resumes from; the same on all ranks.

    From here on the folder belongs to this run. Raises ``PlanError`` when [run] folder and resume
    do not fit what is on the disk, ``CheckpointClaimedError`` when another run writes there.
    """
    answer = None
    if communicator.rank == 0:
        chosen = _choose(config)
        answer = [str(chosen.path), str(chosen.checkpoint or "")]
    path, start = communicator.gather_values(answer, label="run folder")[0]
    return RunFolder(path=Path(path), checkpoint=Path(start) if start else None)


def describe_run(config: TrainConfig, text: ByteText) -> dict[str, object]:
    """Describe what makes a run's numbers, for JSON: configuration, fingerprint of the text."""
    return {
        "config": plain(config),
        "text": {
            "training": _fingerprint(text.training.data),
            "held out": _fingerprint(text.validation.data),
        },
    }


def _check_same_run(saved: object, run: Mapping[str, object], path: Path) -> None:
    """Raise ``CheckpointMismatchError`` when ``path`` was saved by a run unlike this one."""
    found = [
        f"{key} = {theirs} there, {ours} here"
        for key, theirs, ours in _differences(saved, json.loads(json.dumps(run)))
        if not key.startswith(_FREE) or key in _BOUND
    ]
    if found:
        raise CheckpointMismatchError(
            f"the checkpoint {path} belongs to another plan or run: {'; '.join(found)}; use "
            "its values, choose another [run] folder, or set [run] accept_changes = true"
        )


def require_start(resume: str) -> None:
    """Raise ``PlanError`` when [run] resume names a folder that is not there."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise PlanError(
            f"[run] resume = {resume}: expected auto, never, the folder of a run or a checkpoint, "
            "found no such folder"
        )


def require_folder(folder: Path) -> None:
    """Raise ``PlanError`` when ``folder`` is not there and cannot be made, or written to."""
    standing = next((p for p in (folder, *folder.absolute().parents) if os.path.lexists(p)), folder)
    try:
        # Only making something tells: permissions say little to root, or on a special file system.
        os.rmdir(tempfile.mkdtemp(prefix=".meshwright-", dir=standing))
    except OSError as error:
        raise PlanError(
            f"[run] folder = {folder}: expected a folder that is there or can be made, but in "
            f"{standing} nothing can be written: {error.strerror}; choose another [run] folder"
        ) from error


def _choose(config: TrainConfig) -> RunFolder:
    resume, folder = config.run.resume, config.run.folder
    named = None if resume in ("auto", "never") else Path(resume)
    require_start(resume)
    if folder:
        path = Path(folder)
    else:
        path = _fresh_folder(config) if named is None else _home_of(named)
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
    # What is passed over is named in the log: the same folder is not looked through twice.
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
    """Find the checkpoint that ``named`` is, or the newest of the run that it is."""
    if not (named / CHECKPOINTS).is_dir():
        return named
    newest = checkpoint.latest(named / CHECKPOINTS)
    if newest is None:
        raise PlanError(
            f"[run] resume = {named}: expected a complete checkpoint in {named / CHECKPOINTS}, "
            "found none; leave resume out to start anew"
        )
    return newest


def _home_of(named: Path) -> Path:
    """Find the folder of the run that ``named`` is, or that it is a checkpoint of."""
    if (named / CHECKPOINTS).is_dir():
        return named
    # A checkpoint stands in checkpoints/ of its run; one that was copied elsewhere stands alone.
    home = named.absolute().parent
    if home.name != CHECKPOINTS:
        raise CheckpointError(
            f"{named} is not in a run's {CHECKPOINTS} folder, so it does not say where to write; "
            "give [run] folder too"
        )
    return home.parent


def _fresh_folder(config: TrainConfig) -> Path:
    name = Path(config.origin.source).stem or "run"
    path = first = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    require_folder(path)
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):  # another run, started in the same second
            path.mkdir(parents=True)
            break
        path = first.with_name(f"{first.name}-{number}")
    return path


def _fingerprint(data: Tensor) -> str:
    """Write size and checksum; of a text larger than 64 MiB, the checksum of its beginning."""
    checksum = zlib.crc32(data[:_FINGERPRINT_BYTES].numpy().data)
    return f"{data.numel()} bytes, crc32 {checksum:08x}"


def _differences(first: object, second: object) -> Iterator[tuple[str, str, str]]:
    """List dotted key and both values wherever two JSON trees differ."""
    ours, theirs = dict(json_leaves(first)), dict(json_leaves(second))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if ours.get(key) != theirs.get(key):
            name = key.removeprefix("config.")
            yield name, ours.get(key, "nothing"), theirs.get(key, "nothing")


def json_leaves(tree: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Read each value of a JSON tree, as text, with its dotted key."""
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
) -> Path:
    """Save everything that going on exactly needs; returns the checkpoint's folder.

    No generator is saved: before each step it is seeded from the run's seed, the step and the
    rank's share, so the step's number says it all.
    """
    return checkpoint.save(
        folder.checkpoints,
        trainable.steps,
        model=trainable,
        data=sampler,
        extra={"run": json.loads(json.dumps(run))},
        random=False,
        keep_last=keep_last,
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
    """Put ``trainable`` and ``sampler`` where the run was when it saved the checkpoint ``path``.

    Raises ``CheckpointMismatchError`` when it was saved by another run, unless ``accept_changes``,
    or does not fit the model; ``CheckpointDamagedError`` when its bytes are not those saved.
    """
    extra = checkpoint.load(path).extra
    if not isinstance(extra, dict) or "run" not in extra:
        raise CheckpointMismatchError(
            f"the checkpoint {path} was not saved by `meshwright train`: it holds no run; load it "
            "with checkpoint.load"
        )
    if not accept_changes:
        _check_same_run(extra["run"], run, path)
    try:
        checkpoint.load(path, model=trainable, data=None if accept_changes else sampler)
        if accept_changes:  # such as other data: then it goes on at the same place in another order
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
