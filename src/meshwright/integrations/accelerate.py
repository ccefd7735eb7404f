"""Meshwright's models in Hugging Face's Accelerate, and so in the Trainer of transformers.

::

    from meshwright.integrations import accelerate

    accelerate.install()
    model, optimizer, data = Accelerator().prepare(model, optimizer, data)

`install` puts our classes under torch's names (`torch_names`), so that ``prepare`` wraps models in
our class and ``unwrap_model`` recognizes it. It also patches six methods of ``Accelerator`` for
which that is not enough; for models that are not ours, they behave as before.

A patch can be undone. Its function gets the original method, then the arguments of the call. It
lists the argument names that it expects of the method, since another version may have others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright import checkpoint
from meshwright.data_parallel import DistributedDataParallel, FSDPModule
from meshwright.data_parallel.modules.of_this_process import OfThisProcess
from meshwright.data_parallel.replicas.reducer import GradientReducer
from meshwright.data_parallel.replicas.replicated import ReplicatedModule, replica_state
from meshwright.fsdp import FullyShardedDataParallel
from meshwright.gradients import clip_grad_norm_
from meshwright.integrations import torch_names
from meshwright.torch_internals.modules import COMPILED

Changes = Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]
"""By the name of a method: its expected arguments, and the function called in its place."""

_BEFORE = "_before_meshwright"
"""The attribute of a patched method that holds the original."""


def change(*all_changes: tuple[type, Changes]) -> None:
    """Patch methods of classes. A second call does nothing.

    Raises RuntimeError, and changes nothing, if a method takes other arguments.
    """
    for cls, changes in all_changes:
        for name, (known, _) in changes.items():
            found = _arguments_of(cls, name)
            if found != known:
                raise RuntimeError(
                    f"{cls.__name__}.{name} takes {found} in this version of "
                    f"{cls.__module__.partition('.')[0]}, but meshwright expects {known}: "
                    "see docs/clients.md for the tested versions"
                )
    for cls, changes in all_changes:
        for name, (_, ask) in changes.items():
            if not hasattr(getattr(cls, name), _BEFORE):
                setattr(cls, name, _changed(vars(cls)[name], ask))


def fits(cls: type, changes: Changes) -> bool:
    """Check whether the methods of ``cls`` take the expected arguments."""
    return all(_arguments_of(cls, name) == known for name, (known, _) in changes.items())


def _arguments_of(cls: type, name: str) -> tuple[str, ...] | None:
    method = getattr(cls, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)


def put_back(*all_changes: tuple[type, Changes]) -> None:
    """Restore the methods that `change` patched. Does nothing without it."""
    for cls, changes in all_changes:
        for name in changes:
            before = getattr(getattr(cls, name), _BEFORE, None)
            if before is not None:
                setattr(cls, name, before)


def _changed(before: Any, ask: Callable[..., Any]) -> Any:  # noqa: ANN401 - methods
    """Make the method that calls ``ask`` with the original, ``before``."""
    function = before.__func__ if isinstance(before, staticmethod) else before

    @functools.wraps(function)
    def ours(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - theirs
        if function is not before:
            return ask(function, *args, **kwargs)
        return ask(functools.partial(function, args[0]), *args, **kwargs)

    setattr(ours, _BEFORE, before)
    return ours if function is before else staticmethod(ours)


FOLDER = "meshwright"
"""The folder, inside Accelerate's checkpoint, with a sharded model and its optimizer."""


def install() -> None:
    """Make Accelerate prepare, run, save and load our models. A second call does nothing.

    Raises RuntimeError for a version whose methods take unknown arguments.
    """
    from accelerate import Accelerator

    change((Accelerator, _CHANGES))
    torch_names.install()


def uninstall() -> None:
    """Undo `install`, also for torch's names. Does nothing without it."""
    from accelerate import Accelerator

    put_back((Accelerator, _CHANGES))
    torch_names.uninstall()


def _prepare_model(
    theirs: Callable[..., Any],
    accelerator: Any,  # noqa: ANN401 - an Accelerator
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:  # noqa: ANN401 - a module, or what it has compiled
    """Prepare ``model``; one of our models is neither moved nor wrapped again."""
    if isinstance(inside(model), DistributedDataParallel | OfThisProcess):
        device_placement, evaluation_mode = False, True  # evaluation mode adds no wrapper
    return theirs(model, device_placement=device_placement, evaluation_mode=evaluation_mode)


@contextlib.contextmanager
def _trigger_sync_in_backward(theirs: Callable[..., Any], model: nn.Module) -> Iterator[None]:
    """Reduce gradients in the backward of a forward that ran under ``no_sync``."""
    reducer = _reducer_of(inside(model))
    if reducer is None:
        with theirs(model):
            yield
        return
    reducer.synchronize(True)
    yield


def _get_state_dict(
    theirs: Callable[..., Any],
    accelerator: Any,  # noqa: ANN401 - an Accelerator
    model: nn.Module,
    unwrap: bool = True,
) -> Any:  # noqa: ANN401 - a state dict
    """Return the state of ``model``: for a sharded one, full on rank 0 and empty on the others."""
    if not is_sharded(accelerator, model):
        return theirs(model, unwrap=unwrap)
    found: dict[str, object] = {}
    for name, value in inside(model).state_dict().items():
        whole = value.full_tensor().cpu() if hasattr(value, "full_tensor") else value
        if accelerator.is_main_process:
            found[name] = whole
    return found


def _save_state(
    theirs: Callable[..., Any],
    accelerator: Any,  # noqa: ANN401 - an Accelerator
    output_dir: str | None = None,
    safe_serialization: bool = True,
    **keywords: object,
) -> Any:  # noqa: ANN401 - a path
    """Save the state, with our checkpoint for a sharded model and its optimizer.

    Accelerate itself would save only rank 0's part of them.
    """
    with _sharded(accelerator) as loop:
        place = theirs(output_dir, safe_serialization, **keywords)
    if loop is not None:
        save_loop(place, **loop)
    return place


def save_loop(place: str | Path, **loop: Any) -> None:
    """Save our checkpoint inside Accelerate's, as the step after any that exists there."""
    folder = Path(place) / FOLDER
    last = checkpoint.latest(folder)
    step = 0 if last is None else int(last.name.partition("_")[2]) + 1
    checkpoint.save(folder, step, keep_last=1, random=False, **loop)


def load_loop(place: str | Path, **loop: Any) -> None:
    """Load what `save_loop` saved."""
    checkpoint.load(Path(place) / FOLDER, random=False, **loop)


def _load_state(
    theirs: Callable[..., Any],
    accelerator: Any,  # noqa: ANN401 - an Accelerator
    input_dir: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **keywords: object,
) -> None:
    places: list[str] = []  # Accelerate chooses the folder when it names checkpoints itself

    def note(_: object, place: str) -> None:
        places.append(place)

    with _sharded(accelerator) as loop:
        hook = accelerator.register_load_state_pre_hook(note)
        try:
            theirs(input_dir, load_kwargs, **keywords)
        finally:
            hook.remove()
    if loop is not None:
        load_loop(places[0], **loop)


@contextlib.contextmanager
def _sharded(accelerator: Any) -> Iterator[dict[str, Any] | None]:  # noqa: ANN401
    """Hide a sharded model and its optimizers from Accelerate and yield them; None without one."""
    models, optimizers = accelerator._models, accelerator._optimizers
    sharded = [inside(model) for model in models if is_sharded(accelerator, model)]
    if not sharded:
        yield None
        return
    if len(models) != 1:
        raise ValueError(
            f"Accelerate has {len(models)} models, {len(sharded)} of them sharded: its save_state "
            "and load_state handle one sharded model only. Use meshwright.checkpoint.save and load "
            "for each"
        )
    kept = [*models], [*optimizers]
    models.clear()
    optimizers.clear()
    try:
        yield {"model": sharded[0], "optimizer": [each.optimizer for each in kept[1]] or None}
    finally:
        models.extend(kept[0])
        optimizers.extend(kept[1])


def is_sharded(accelerator: Any, model: nn.Module) -> bool:  # noqa: ANN401 - an Accelerator
    """True for a model that we sharded, except where Accelerate's own FSDP plugin handles it."""
    kinds = FSDPModule | FullyShardedDataParallel
    return accelerator.distributed_type != "FSDP" and isinstance(inside(model), kinds)


def _clip_grad_norm(
    theirs: Callable[..., Any],
    accelerator: Any,  # noqa: ANN401 - an Accelerator
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2,
) -> Any:  # noqa: ANN401 - a tensor
    """Clip by the norm over all ranks, also for shards that are plain tensors."""
    if not any(is_sharded(accelerator, model) for model in accelerator._models):
        return theirs(parameters, max_norm, norm_type=norm_type)
    accelerator.unscale_gradients()
    return clip_grad_norm_(parameters, max_norm, norm_type)


def inside(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of `torch.compile`, or ``model``."""
    return getattr(model, COMPILED, model)


def _reducer_of(model: nn.Module) -> GradientReducer | None:
    if isinstance(model, DistributedDataParallel):
        return model.reducer
    if isinstance(model, ReplicatedModule):
        return replica_state(model).set_up().reducer
    return None


_CHANGES: Changes = MappingProxyType(
    {
        "prepare_model": (
            ("self", "model", "device_placement", "evaluation_mode"),
            _prepare_model,
        ),
        "trigger_sync_in_backward": (("model",), _trigger_sync_in_backward),
        "clip_grad_norm_": (("self", "parameters", "max_norm", "norm_type"), _clip_grad_norm),
        "get_state_dict": (("self", "model", "unwrap"), _get_state_dict),
        "save_state": (
            ("self", "output_dir", "safe_serialization", "save_model_func_kwargs"),
            _save_state,
        ),
        "load_state": (
            ("self", "input_dir", "load_kwargs", "load_model_func_kwargs"),
            _load_state,
        ),
    }
)
