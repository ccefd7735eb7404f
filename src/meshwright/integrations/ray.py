"""Loops of Ray Train: metrics and checkpoints, and a trainer that may restart at another size.

Ray starts the workers and makes torch's process group, which `meshwright.comm.connect` in the loop
adopts. Needs ``ray[train]``. Ray runs the loop in a thread of its own, so reports of hangs show
the worker's main thread, not the loop.
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
    """Make Ray's ``TorchTrainer`` for a ``loop`` whose workers are connected before it starts.

    ``workers`` is their number, or the smallest and largest number: then Ray restarts, up to
    ``failures`` times, with the workers that are left when it loses one. ``loop`` gets ``config``,
    resumes from `latest_checkpoint`, and calls `report`. ``storage`` is a folder or an address
    that all machines see.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def connected(given: Mapping[str, object]) -> None:
        connect()
        try:
            with phase("train"):
                loop(given)
        finally:
            disconnect()  # if the loop raised, this also tells the other workers

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
    """Report ``metrics``, and a checkpoint in ``folder``, to Ray Train; every worker calls it.

    All workers have saved to the folder together, as `meshwright.checkpoint.save` does. Rank 0
    hands it to Ray, which copies it to its storage.
    """
    from ray import train

    is_first = communicator().rank == 0
    kept = train.Checkpoint.from_directory(str(folder)) if folder and is_first else None
    train.report(dict(metrics), checkpoint=kept)


@contextlib.contextmanager
def latest_checkpoint() -> Iterator[Path | None]:
    """The folder of the last checkpoint reported to Ray; None at the beginning.

    It exists within the block. Any number of workers may have saved it. After a loop that failed
    during its last `report`, it may be the one before, so that steps are saved again. No checkpoint
    is ever overwritten, so give each attempt a folder of its own.
    """
    from ray import train

    kept = train.get_checkpoint()
    if kept is None:
        yield None
        return
    with kept.as_directory() as folder:
        yield Path(folder)
