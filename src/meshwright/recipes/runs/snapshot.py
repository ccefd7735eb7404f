"""A run's state as a checkpoint, and back: model, optimizer, place in the text, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright.checkpoint import JSON, load, read_manifest, save
from meshwright.checkpoint.nested import flatten, unflatten
from meshwright.comm import Communicator
from meshwright.composition import Trainable
from meshwright.errors import CheckpointMismatchError
from meshwright.recipes.runs.run_folder import RunFolder, check_same_run
from meshwright.sampling import Sampler

__all__ = ["restore_run", "save_run"]

FORMAT = 1


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
    state = trainable.state_dict()
    state["model"] = dict(state["model"])
    tensors, structure = flatten(state, "state")
    metadata: dict[str, JSON] = {
        "format": FORMAT,
        "run": _as_json(run),
        "sampler": dict(sampler.state_dict()),
        "state": structure,
    }
    return save(
        folder.checkpoints,
        tensors,
        metadata,
        step=trainable.steps,
        communicator=communicator,
        keep_last=keep_last,
    )


def restore_run(
    checkpoint: Path,
    trainable: Trainable,
    sampler: Sampler,
    run: Mapping[str, object],
    *,
    accept_changes: bool,
) -> None:
    """Put ``trainable`` and ``sampler`` where the run was when it saved ``checkpoint``.

    Raises ``CheckpointMismatchError`` when it was saved by another run, unless ``accept_changes``,
    or does not fit the model; ``CheckpointDamagedError`` when its bytes are not those saved.
    """
    metadata = read_manifest(checkpoint).metadata
    if metadata.get("format") != FORMAT:
        raise CheckpointMismatchError(
            f"the checkpoint {checkpoint} was not saved by `meshwright train`, or by another "
            f"version: expected format {FORMAT}, found {metadata.get('format')}"
        )
    if not accept_changes:
        check_same_run(metadata["run"], run, checkpoint)
    loaded = load(checkpoint)
    state = unflatten(metadata["state"], loaded.tensors)
    position = metadata["sampler"]
    if not isinstance(state, dict) or not isinstance(position, dict):
        raise CheckpointMismatchError(f"the checkpoint {checkpoint} holds no state of a run")
    try:
        trainable.load_state_dict(state)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointMismatchError(
            f"the checkpoint {checkpoint} belongs to another model: "
            + " ".join(str(error).split())
            + "; use the [model] it was saved with"
        ) from error
    sampler.load_state_dict({key: int(str(value)) for key, value in position.items()})


def _as_json(value: object) -> JSON:
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"expected JSON, found {type(value).__name__}")
