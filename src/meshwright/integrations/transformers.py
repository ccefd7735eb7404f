"""Models of ours in the Trainer of transformers.

::

    from meshwright.integrations import transformers

    transformers.install()
    Trainer(model=fully_shard(model), ...).train(resume_from_checkpoint=...)

Under data parallelism it needs what Accelerate needs (`meshwright.integrations.accelerate`), which
`install` does, too. For a model that was sharded before, six methods of ``Trainer`` are changed:
what they would write is the part of rank 0. Its checkpoints have the model, the optimizer and the
scheduler as a checkpoint of ours, which any number of ranks goes on from, beside the whole weights
for ``from_pretrained``. Where it looks at the name of the model's class, for a smoothed loss and
for what it writes, it finds that of the class before; so does ``save_pretrained`` of a model and of
an adapter of PEFT.
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
from meshwright.integrations.changes import Changes, change, fits, put_back

_NAME = "__name__"
_log = logging.getLogger(__name__)


def install() -> None:
    """Make the Trainer train, save and resume models of ours. Nothing the second time.

    Models that transformers shards at load time are sharded by ours from now on.

    Raises RuntimeError for a version whose methods take other arguments than those known here.
    """
    accelerate.install()  # first: transformers imports names of torch
    _import_names_anew()
    change(*_changes())


def uninstall() -> None:
    """Put back what `install` has changed, the names of torch too. Nothing without it."""
    put_back(*_changes())
    accelerate.uninstall()
    _import_names_anew()


def _import_names_anew() -> None:
    """Have the module that shards at load time, where it is there, take torch's names as now."""
    if (loaded := sys.modules.get("transformers.distributed.fsdp")) is not None:
        importlib.reload(loaded)


def _changes() -> list[tuple[type, Changes]]:
    """List what is changed."""
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
    """Save under the name of the class before: ``auto_map`` and the adapter's configuration."""
    with _under_its_name(model):
        return theirs(*args, **keywords)


def _save(
    theirs: Callable[..., Any],
    trainer: Any,  # noqa: ANN401 - a Trainer
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    """Save the weights for ``from_pretrained``, whole."""
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
    """Compute the loss; a smoothed one compares the next token where the class is a known one."""
    if trainer.label_smoother is None:
        return theirs(*args, **keywords)
    with _under_its_name(accelerate.inside(trainer.model)):
        return theirs(*args, **keywords)


@contextlib.contextmanager
def _under_its_name(model: nn.Module) -> Iterator[None]:
    """Give the classes of sharded modules the name that they had before, within the block."""
    kinds = {type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    names = {kind: kind.__name__ for kind in kinds}
    for kind in kinds:
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
