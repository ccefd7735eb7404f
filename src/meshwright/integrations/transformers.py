"""Models of ours in the Trainer of transformers.

::

    from meshwright.integrations import transformers

    transformers.install()
    Trainer(model=fully_shard(model), ...).train(resume_from_checkpoint=...)

Under data parallelism it needs what Accelerate needs (`meshwright.integrations.accelerate`), which
`install` does, too. For a model that was sharded before, five methods of ``Trainer`` are changed:
what they would write is the part of rank 0. Its checkpoints have the model, the optimizer and the
scheduler as a checkpoint of ours, which any number of ranks goes on from, beside the whole weights
for ``from_pretrained``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.integrations import accelerate
from meshwright.integrations.changes import Changes, change, put_back


def install() -> None:
    """Make the Trainer train, save and resume models of ours. Nothing the second time.

    Models that transformers shards at load time are sharded by ours from now on.

    Raises RuntimeError for a version whose methods take other arguments than those known here.
    """
    accelerate.install()  # first: transformers imports names of torch
    _import_names_anew()
    from transformers import Trainer

    change(Trainer, _CHANGES)


def uninstall() -> None:
    """Put back what `install` has changed, the names of torch too. Nothing without it."""
    from transformers import Trainer

    put_back(Trainer, _CHANGES)
    accelerate.uninstall()
    _import_names_anew()


def _import_names_anew() -> None:
    """Have the module that shards at load time, where it is there, take torch's names as now."""
    if (loaded := sys.modules.get("transformers.distributed.fsdp")) is not None:
        importlib.reload(loaded)


def _save(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    """Save the weights for ``from_pretrained``, whole."""
    if _is_sharded(trainer) and state_dict is None:
        state_dict = trainer.accelerator.get_state_dict(trainer.model)
    theirs(output_dir, state_dict)


def _save_optimizer_and_scheduler(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    output_dir: str,
) -> None:
    if not _is_sharded(trainer):
        theirs(output_dir)
        return
    accelerate.save_loop(output_dir, **_loop(trainer))


def _load_optimizer_and_scheduler(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    checkpoint: str | None,
) -> None:
    """Load the optimizer and the scheduler, and the weights of a sharded model."""
    if not _is_sharded(trainer) or checkpoint is None:
        theirs(checkpoint)
        return
    accelerate.load_loop(checkpoint, **_loop(trainer))


def _load_from_checkpoint(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    resume_from_checkpoint: str,
    model: nn.Module | None = None,
) -> None:
    """Load the weights, or leave it to `_load_optimizer_and_scheduler`."""
    if not _is_sharded(trainer):
        theirs(resume_from_checkpoint, model)


def _load_best_model(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
) -> None:
    if not _is_sharded(trainer):
        theirs()
        return
    place = trainer.state.best_model_checkpoint
    accelerate.load_loop(place, model=accelerate.inside(trainer.model))


def _loop(trainer: Any) -> dict[str, Any]:  # noqa: ANN401 - a Trainer
    optimizer = trainer.optimizer
    return {
        "model": accelerate.inside(trainer.model),
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": trainer.lr_scheduler,
    }


def _is_sharded(trainer: Any) -> bool:  # noqa: ANN401 - a Trainer
    """Return True for a model that was sharded before; transformers has a way for its own."""
    is_theirs = trainer.is_distributed_loading_by_transformers
    return not is_theirs and accelerate.is_sharded(trainer.accelerator, trainer.model)


_CHANGES: Changes = MappingProxyType(
    {
        "_save": (("self", "output_dir", "state_dict"), _save),
        "_save_optimizer_and_scheduler": (("self", "output_dir"), _save_optimizer_and_scheduler),
        "_load_optimizer_and_scheduler": (("self", "checkpoint"), _load_optimizer_and_scheduler),
        "_load_from_checkpoint": (
            ("self", "resume_from_checkpoint", "model"),
            _load_from_checkpoint,
        ),
        "_load_best_model": (("self",), _load_best_model),
    }
)
