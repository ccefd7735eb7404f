"""Loops of Ray Train: metrics and checkpoints, and a trainer that may come back at another size.

Ray starts the workers and makes the process group of torch; `meshwright.comm.connect` in the loop
adopts that group. Needs ``ray[train]``. A loop runs in a thread of its own there, so reports of
hangs show where the worker's main thread is, and not where the loop is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.comm import communicator, connect, disconnect, phase


def trainer(
    loop: Callable[[Mapping[str, object]], None],
    workers: int | tuple[int, int],
    *,
    config: Mapping[str, object] | None = None,
    storage: str | Path | None = None,
    name: str | None = None,
    failures: int = 0,
    use_gpu: bool = False,
) -> Any:  # noqa: ANN401 - a class of Ray's
    """Make Ray's ``TorchTrainer`` of a ``loop`` whose workers are connected before it starts.

    ``workers`` is their number, or the least and the most of it: then Ray begins again with as many
    as there are when it loses one, and up to ``failures`` times. ``loop`` gets ``config``, finds
    where to go on by `latest_checkpoint`, and tells by `report`. ``storage`` is a folder or an
    address that all machines see.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def connected(given: Mapping[str, object]) -> None:
        connect()
        try:
            with phase("train"):
                loop(given)
        finally:
            disconnect()  # tells the other workers, too, where the loop has raised

    return TorchTrainer(
        connected,
        train_loop_config=dict(config or {}),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=name,
            storage_path=None if storage is None else str(storage),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )


def report(metrics: Mapping[str, object], folder: str | Path | None = None) -> None:
    """Tell Ray Train ``metrics``, and of a checkpoint in ``folder``; every worker calls it.

    The folder is one that all workers have saved to together, as `meshwright.checkpoint.save` does:
    rank 0 gives it to Ray, which copies it to its storage.
    """
    from ray import train

    is_first = communicator().rank == 0
    kept = train.Checkpoint.from_directory(str(folder)) if folder and is_first else None
    train.report(dict(metrics), checkpoint=kept)


@contextlib.contextmanager
def latest_checkpoint() -> Iterator[Path | None]:
    """Find the folder of the checkpoint that Ray has last been told of; None at the beginning.

    It is there within the block. Any number of workers may have saved it. It may be the one before
    the last `report` of a loop that failed just then: each attempt saves to a folder of its own, as
    no checkpoint is overwritten.
    """
    from ray import train

    kept = train.get_checkpoint()
    if kept is None:
        yield None
        return
    with kept.as_directory() as folder:
        yield Path(folder)
