"""Meshwright's models in the Trainer of transformers.

::

    from meshwright.integrations import transformers

    transformers.install()
    Trainer(model=fully_shard(model), ...).train(resume_from_checkpoint=...)

`install` also installs `meshwright.integrations.accelerate`, which data parallelism needs. For a
model that we sharded, it patches six methods of ``Trainer``, which would write only rank 0's part.
The Trainer's checkpoints then hold the model, the optimizer and the scheduler as our checkpoint,
from which any number of ranks can resume, and the full weights for ``from_pretrained``. Where the
Trainer looks at the name of the model's class, for a smoothed loss and for what it writes, it finds
the name before sharding; so does ``save_pretrained`` of a model and of an adapter of PEFT.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.data_parallel import FSDPModule
from meshwright.integrations import accelerate
from meshwright.integrations.accelerate import Changes, change, fits, put_back

_NAME = "__name__"
_log = logging.getLogger(__name__)


def install() -> None:
    """Make the Trainer train, save and resume our models. A second call does nothing.

    Models that transformers shards at load time are sharded by Meshwright from now on.

    Raises RuntimeError for a version whose methods take unknown arguments.
    """
    accelerate.install()  # first: transformers imports names of torch
    _import_names_anew()
    change(*_changes())


def uninstall() -> None:
    """Undo `install`, also for torch's names. Does nothing without it."""
    put_back(*_changes())
    accelerate.uninstall()
    _import_names_anew()


def _import_names_anew() -> None:
    """Reload transformers' module that shards at load time, if loaded, with the current names."""
    if (loaded := sys.modules.get("transformers.distributed.fsdp")) is not None:
        importlib.reload(loaded)


def _changes() -> list[tuple[type, Changes]]:
    from transformers import PreTrainedModel, Trainer

    found: list[tuple[type, Changes]] = [(Trainer, _CHANGES), (PreTrainedModel, _MODEL_CHANGES)]
    peft = sys.modules.get("peft")  # which the Trainer imports, if it is there
    if peft is not None and fits(peft.PeftModel, _PEFT_CHANGES):
        found.append((peft.PeftModel, _PEFT_CHANGES))
    elif peft is not None:
        _log.warning(
            "this version of peft is not known: adapters of sharded models are saved under the "
            "name of the sharded class as base_model_class"
        )
    return found


def _save_pretrained(
    theirs: Callable[..., Any], model: nn.Module, *args: Any, **keywords: Any
) -> Any:  # noqa: ANN401 - theirs
    """Save with the class name before sharding, in ``auto_map`` and the adapter's configuration."""
    with _under_its_name(model):
        return theirs(*args, **keywords)


def _save(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    if _is_sharded(trainer) and state_dict is None:
        state_dict = trainer.accelerator.get_state_dict(trainer.model)
    with _under_its_name(accelerate.inside(trainer.model)):
        theirs(output_dir, state_dict)


def _compute_loss(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    *args: Any,
    **keywords: Any,
) -> Any:  # noqa: ANN401 - a loss, or with what the model has returned
    """Compute the loss; label smoothing shifts labels for classes that it knows by name."""
    if trainer.label_smoother is None:
        return theirs(*args, **keywords)
    with _under_its_name(accelerate.inside(trainer.model)):
        return theirs(*args, **keywords)


@contextlib.contextmanager
def _under_its_name(model: nn.Module) -> Iterator[None]:
    """Give the classes of sharded modules their names before sharding, within the block."""
    kinds = {type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    names = {kind: kind.__name__ for kind in kinds}
    for kind in kinds:
        # `fully_shard` makes a class with the bases FSDPModule and the module's class.
        setattr(kind, _NAME, kind.__bases__[1].__name__)
    try:
        yield
    finally:
        for kind, name in names.items():
            setattr(kind, _NAME, name)


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
    """Load the optimizer and the scheduler; for a sharded model, the weights too."""
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
    """Load the weights; those of a sharded model are left to `_load_optimizer_and_scheduler`."""
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
    """True for a model that we sharded, except one that transformers sharded at load time."""
    is_theirs = trainer.is_distributed_loading_by_transformers
    return not is_theirs and accelerate.is_sharded(trainer.accelerator, trainer.model)


_CHANGES: Changes = MappingProxyType(
    {
        "_save": (("self", "output_dir", "state_dict"), _save),
        "compute_loss": (
            ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
            _compute_loss,
        ),
        "_save_optimizer_and_scheduler": (("self", "output_dir"), _save_optimizer_and_scheduler),
        "_load_optimizer_and_scheduler": (("self", "checkpoint"), _load_optimizer_and_scheduler),
        "_load_from_checkpoint": (
            ("self", "resume_from_checkpoint", "model"),
            _load_from_checkpoint,
        ),
        "_load_best_model": (("self",), _load_best_model),
    }
)

_MODEL_CHANGES: Changes = MappingProxyType(
    {
        "save_pretrained": (
            (
                "self",
                "save_directory",
                "is_main_process",
                "state_dict",
                "push_to_hub",
                "max_shard_size",
                "variant",
                "token",
                "save_peft_format",
                "save_original_format",
                "distributed_checkpoint",
                "kwargs",
            ),
            _save_pretrained,
        )
    }
)

_PEFT_CHANGES: Changes = MappingProxyType(
    {
        "save_pretrained": (
            (
                "self",
                "save_directory",
                "safe_serialization",
                "selected_adapters",
                "save_embedding_layers",
                "is_main_process",
                "path_initial_model_for_weight_conversion",
                "kwargs",
            ),
            _save_pretrained,
        )
    }
)
