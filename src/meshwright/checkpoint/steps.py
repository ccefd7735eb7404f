"""The folder of a run's checkpoints: names of steps, the newest one, leftovers of interruptions.

::

    step_00000120               a checkpoint: it got this name when it was complete on the disk
    .step_00000130.tmp-1f0c22d9 torso of an interrupted save: never read, removed by the next save
    .step_00000110.old-77ab01c3 torso of an interrupted removal: the same
    .claim                      locked by the job that saves here: see `claims`

Only the holder of the claim removes anything, so all torsos belong to jobs that have ended.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path

from meshwright.checkpoint.claims import is_claimed
from meshwright.checkpoint.manifest import MAX_STEP
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.storage import Storage
from meshwright.errors import CheckpointDamagedError, CheckpointError

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step_([0-9]{8,16})")
_TORSO = re.compile(r"\.step_[0-9]{8,16}\.(tmp|old)-[0-9a-f]{8}")


def step_directory(folder: str | os.PathLike[str], step: int) -> Path:
    """Return the directory of the checkpoint of ``step``.

    Raises ``ValueError`` for a step out of range.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ValueError(f"step must be an integer from 0 to {MAX_STEP}, found {step!r}")
    return Path(folder) / f"step_{step:08d}"


def torso_directory(target: Path, kind: str = "tmp") -> Path:
    """Return a unique path beside ``target`` for an unfinished or discarded checkpoint."""
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(4)}")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder; ``None`` if there is none to resume from.

    Complete means: a sound manifest for this step, and every file with its right size; the contents
    are verified when they are loaded. Skipped directories are logged. A job that saves to the
    folder meanwhile may remove the returned checkpoint.
    Raises ``CheckpointDamagedError`` when there are checkpoints but none is usable (a crash
    alone never leads there, and starting over silently would lose the run), and
    ``CheckpointError`` when the folder cannot be read.
    """
    for torso in _torsos(Path(folder)):
        if not is_claimed(Path(folder)) and os.path.lexists(torso):
            _log.warning("ignoring %s: left by an interrupted save", torso)
    while True:
        problems: list[str] = []
        for step, path in reversed(_steps(Path(folder))):
            problem = _incomplete(step, path)
            if problem is None:
                return path
            if not path.is_dir():
                break  # the job that saves here has removed it, and saved others: look again
            _log.warning("ignoring %s: %s", path, problem)
            problems.append(problem)
        else:
            break
    if problems:
        raise CheckpointDamagedError(
            f"no checkpoint in {folder} is usable; the newest: {problems[0]};"
            " restore one from a copy, or choose an empty folder to start over"
        )
    return None


def prune(newest: Path, keep_last: int, storage: Storage) -> None:
    """Remove the oldest complete checkpoints beside ``newest`` until ``keep_last`` are left.

    ``newest`` stays whatever its step, and only complete checkpoints count. Each one loses its name
    first, so that an interruption leaves a torso and never half a checkpoint.
    """
    folder = newest.parent
    complete = [
        path for step, path in _steps(folder) if path != newest and _incomplete(step, path) is None
    ]
    for path in complete[: max(len(complete) + 1 - keep_last, 0)]:
        torso = torso_directory(path, "old")
        storage.rename(path, torso)
        storage.sync_directory(folder)  # before a file goes: no name of a step may come back
        storage.remove_tree(torso)


def remove_torsos(folder: Path, storage: Storage) -> None:
    """Remove torsos of interrupted saves and removals, logging each."""
    for torso in _torsos(folder):
        _log.warning("removing %s: left by an interrupted save", torso)
        try:
            storage.remove_tree(torso)
        except OSError as error:
            _log.warning("could not remove %s: %s", torso, error)


def _incomplete(step: int, path: Path) -> str | None:
    """Describe why a checkpoint cannot be resumed from, by names and sizes, or return None."""
    try:
        with Reader(path) as reader:
            found = reader.manifest.step
    except CheckpointError as error:
        if isinstance(error, CheckpointDamagedError) or not path.is_dir():
            return str(error)
        raise
    if found != step:
        return f"{path} holds step {found}"
    return None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """List the directories named after a step, by step, as a consistent snapshot."""
    found: list[tuple[int, Path]] = []
    for name in _names(folder):
        match = _STEP.fullmatch(name)
        if match is None or step_directory(folder, int(match[1])).name != name:
            continue
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            found.append((int(match[1]), path))
        elif os.path.lexists(path):
            _log.warning("ignoring %s: not a directory", path)
        else:  # a running job has removed it and saved others: list again
            return _steps(folder)
    return sorted(found)


def _torsos(folder: Path) -> list[Path]:
    paths = [folder / name for name in sorted(_names(folder)) if _TORSO.fullmatch(name)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint folder {folder} cannot be read: {error.strerror}"
        ) from error
