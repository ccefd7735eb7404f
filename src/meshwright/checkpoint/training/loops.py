"""A training loop's `save` and `load`, each in one call.

::

    checkpoint.save("checkpoints", step, model=model, optimizer=optimizer, data=sampler)
    checkpoint.load("checkpoints", model=model, optimizer=optimizer, data=sampler)

Every rank calls them, under any wrapper and on any number of ranks; no rank holds more than its
part of the state and one tensor. Names are those of the plain model, so that any layout resumes
from any other. The structure may differ between the ranks of a pipeline, and is merged::

    rank 0   {"model": {"first.weight": {"$tensor": ...}}}     the manifest   both
    rank 1   {"model": {"last.weight": {"$tensor": ...}}}
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import getstate, setstate
from typing import Any, Literal, Protocol, cast, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.background import PendingSave, begin, finish
from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.manifest import MANIFEST_NAME
from meshwright.checkpoint.nested import flatten
from meshwright.checkpoint.pieces import ShardedPiece
from meshwright.checkpoint.reading import Reader
from meshwright.checkpoint.steps import latest, step_directory, torso_directory
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.together import Group, everyone, together
from meshwright.checkpoint.training.named_optimizer import NamedOptimizer
from meshwright.checkpoint.training.restoring import (
    FORMAT,
    PREFIX,
    VERSION,
    Restoring,
    SavedState,
    piece_of,
)
from meshwright.checkpoint.training.wrapped import ModelState
from meshwright.checkpoint.writing import SaveRequest, save_now
from meshwright.comm import Communicator
from meshwright.comm.streams import is_host
from meshwright.errors import CheckpointError, CheckpointMismatchError

_log = logging.getLogger(__name__)
_OWN_PARAMETERS = re.compile(r"^the state\.optimizer(\[\d+\])?\.param_groups\[\d+\]\.params$")


@runtime_checkable
class Stateful(Protocol):
    """Any object with a state of tensors and plain values, such as a scheduler or a sampler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> object:  # noqa: ANN401 - as each defines it
        """Resume from a state."""


@runtime_checkable
class Laid(Protocol):
    """A model with its optimizer that knows its layout: a `Trainable`."""

    def held_state(self) -> dict[str, Any]:
        """Return this rank's state, with a `ModelState` as ``"model"``."""

    def load_state_dict(self, state: Mapping[str, Any], *, copies: bool) -> None:
        """Load this rank's parts by name; without ``copies`` it takes over ``state``'s tensors."""


Model = nn.Module | Sequence[nn.Module] | Laid
Stated = Stateful | Sequence[Stateful] | Mapping[str, Stateful]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """The checkpoint that `load` has loaded, and its values that were not filled in place."""

    path: Path
    """The checkpoint."""
    step: int
    extra: Any
    """The ``extra`` that `save` was given."""
    has_random: bool
    """True when the generators of random numbers were restored."""
    missing: tuple[str, ...] = ()
    """With ``strict=False``, tensors of the model that keep their values."""
    unexpected: tuple[str, ...] = ()
    """With ``strict=False``, tensors of the checkpoint that the model lacks."""


@overload
def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: Model | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stated | None = None,
    data: Stated | None = None,
    extra: object = None,
    random: bool = True,
    keep_last: int | None = None,
    background: Literal[False] = False,
    communicator: Communicator | None = None,
) -> Path: ...


@overload
def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: Model | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stated | None = None,
    data: Stated | None = None,
    extra: object = None,
    random: bool = True,
    keep_last: int | None = None,
    background: Literal[True],
    communicator: Communicator | None = None,
) -> PendingSave: ...


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: Model | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stated | None = None,
    data: Stated | None = None,
    extra: object = None,
    random: bool = True,
    keep_last: int | None = None,
    background: bool = False,
    communicator: Communicator | None = None,
) -> Path | PendingSave:
    """Save a training loop as ``folder/step_00000120``, complete or not at all; return that path.

    ``model``: a module under any wrapper or none, several (the stages of this rank), or the
    `Trainable` of `parallelize`, with its optimizer. ``optimizer``: one or several, of the model's
    parameters. ``scheduler`` and ``data``: objects with ``state_dict`` and ``load_state_dict``, the
    same on all ranks. ``extra``: plain values and tensors, the same on all ranks, or under each
    rank's own keys. ``random``: the generators of Python, NumPy, torch and this rank's device.
    ``keep_last``: the number of complete checkpoints to keep in ``folder``. All ranks of
    ``communicator`` (by default of the run, or this process alone) must call this.

    ``background``: copy this rank's share of the state to memory that is kept for the next save,
    and have a thread write it while the loop goes on; returns a `PendingSave`. The next save,
    `finish` and the end of the process wait for it. If it fails, they raise, or the next
    `Trainable.step`, on all ranks. Where the copy does not fit, the save is in the foreground.

    Raises `CheckpointWriteError` on all ranks if it cannot be written (earlier checkpoints are
    untouched), `CheckpointClaimedError` if another job saves to ``folder``, and ``TypeError`` or
    ``ValueError`` for state that cannot be saved.

    >>> path = checkpoint.save("checkpoints", 120, model=model, optimizer=optimizer)
    """
    finish()
    group = communicator if communicator is not None else everyone()
    given: dict[str, Any] = {"scheduler": scheduler, "data": data}
    # Before the ranks agree on anything: wrong arguments are wrong on all of them.
    held = _owner(model, optimizer).held_state()
    forms = {key: _form(each) for key, each in given.items() if each is not None}

    def describe() -> tuple[dict[str, ShardedPiece], JSON]:
        state = {**held, **{k: _states(v) for k, v in given.items() if v is not None}}
        if extra is not None:
            state["extra"] = extra
        if random:
            state["random"] = {str(group.rank): _generator_state(_device(group))}
        weights = state.pop("model", None)
        tensors, structure = flatten(state, PREFIX)
        structure = cast("dict[str, JSON]", structure)
        if weights is not None:
            own, structure["model"] = _described(weights)
            tensors.update(own)
        pieces = {
            n: t if isinstance(t, ShardedPiece) else piece_of(n, t) for n, t in tensors.items()
        }
        return pieces, structure

    pieces, rows = together(group, "describe", describe)
    metadata: dict[str, JSON] = {
        "format": FORMAT,
        "version": VERSION,
        "ranks": group.size,
        "state": _joined(rows, "the state"),
        "forms": forms,
    }
    weights: ModelState | None = held.get("model")
    target = step_directory(folder, step)
    request = SaveRequest(
        target=target,
        torso=torso_directory(target),
        tensors=pieces,
        metadata=metadata,
        step=step,
        alike={f"{PREFIX}/model/{name}" for name in (weights.parameters if weights else ())},
        keep_last=keep_last,
        group=group,
        storage=Storage(),
    )
    return begin(request) if background else save_now(request)


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    model: Model | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stated | None = None,
    data: Stated | None = None,
    random: bool = True,
    strict: bool = True,
    communicator: Communicator | None = None,
) -> Loaded:
    """Resume from the result of `save`, on any layout: the arguments are filled in place.

    ``folder``: a checkpoint, or a folder of them, of which the newest is loaded, or that of
    ``step``. State without an argument is ignored; state for an argument must exist. Names, shapes
    and dtypes are compared first, on all ranks; every byte that is read is verified.

    With ``strict=False``, for weights alone, tensors with the same name and shape in both are
    filled; a warning and the result name the rest.

    Generators are restored if the number of ranks is that of the save. Otherwise a warning is
    logged, and they do not change: seed them.

    Raises `CheckpointMismatchError` listing what is missing, unknown, or of another shape or dtype,
    before anything is changed; errors of ``data`` for its state, before the model is changed;
    `CheckpointDamagedError` naming file and tensor, after which the model is unusable;
    `CheckpointError` if there is no checkpoint; ValueError for ``strict=False`` with an optimizer.
    All ranks raise.

    >>> step = checkpoint.load("checkpoints", model=model, optimizer=optimizer).step
    """
    group = communicator if communicator is not None else everyone()
    given = {k: v for k, v in {"scheduler": scheduler, "data": data}.items() if v is not None}

    def choose() -> tuple[None, JSON]:
        return None, str(_chosen(Path(folder), step)) if group.rank == 0 else None

    path = Path(str(together(group, "choose", choose)[1][0]))
    owner = _owner(model, optimizer)
    if not strict and not (isinstance(owner, _Loop) and optimizer is None):
        raise ValueError(
            "strict=False fills weights alone: give load no optimizer, and of a Trainable its "
            "module (model=trainable.module), then make the optimizer"
        )
    held = owner.outline() if isinstance(owner, _Loop) else owner.held_state()
    with together(group, "open", lambda: (SavedState(Reader(path)), None))[0] as saved:
        restoring = Restoring(saved, held, strict=strict)

        def compare() -> tuple[None, JSON]:
            remedy = ""
            if not isinstance(owner, _Loop) and "optimizer" not in saved.structure:
                remedy = "pass model=trainable.module for the weights alone"
            saved.require([*(k for k in ("model", "optimizer") if k in held), *given], remedy)
            for key, each in given.items():
                _compare_forms(saved, key, saved.forms.get(key), _form(each))
            return None, restoring.compare()

        _, rows = together(group, "compare", compare)
        unexpected, _ = together(group, "compare all", lambda: (restoring.compare_all(rows), None))
        structure = saved.structure
        has_random = random and saved.ranks == group.size and "random" in structure

        if data is not None:  # first, because it may reject the state of other data

            def load_data() -> tuple[None, JSON]:
                _load_states(data, saved.read(structure["data"]))
                return None, None

            together(group, "data", load_data)

        def read() -> tuple[dict[str, Any], JSON]:
            found = {key: saved.read(structure.get(key)) for key in ("extra", "scheduler")}
            if has_random:
                found["random"] = saved.read(structure["random"][str(group.rank)])
            return {**found, "owner": restoring.read()}, None

        found, _ = together(group, "read", read)
    owner.load_state_dict(found["owner"], copies=False)
    if scheduler is not None:
        _load_states(scheduler, found["scheduler"])
    missing = sorted({name for row in rows for name in row["kept"]})
    if missing or unexpected:
        _log.warning(
            "%s, loaded with strict=False: %s of the model keep their values; %s of the checkpoint "
            "are left out",
            path,
            ", ".join(missing) or "no tensors",
            ", ".join(unexpected) or "no tensors",
        )
    if has_random:
        _restore_generators(found["random"], _device(group))
    elif random and "random" in structure and group.rank == 0:
        _log.warning(
            "%s was saved on %d ranks and is loaded on %d: random number generators are not "
            "restored; seed them for this step",
            path,
            saved.ranks,
            group.size,
        )
    return Loaded(
        path=path,
        step=saved.step,
        extra=found["extra"],
        has_random=has_random,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def _chosen(folder: Path, step: int | None) -> Path:
    if step is not None:
        return step_directory(folder, step)
    if (folder / MANIFEST_NAME).exists():
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: give a folder that checkpoint.save has saved to, "
            "or begin anew where checkpoint.latest finds none"
        )
    return newest


def _device(group: Group) -> torch.device:
    return group.device if isinstance(group, Communicator) else torch.device("cpu")


# ------------------------------------------------------------------------------ what is given


class _Loop:
    """Modules and optimizers of a user's loop."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if optimizers and not modules:
            raise ValueError("optimizer was given without model: its parameters have no names")
        self.named = [NamedOptimizer(optimizer, modules) for optimizer in optimizers]
        self.weights = ModelState(modules) if modules else None

    def held_state(self) -> dict[str, Any]:
        state = self.outline()
        if self.named:
            found = [each.state() for each in self.named]
            state["optimizer"] = found[0] if len(found) == 1 else found
        return state

    def outline(self) -> dict[str, Any]:
        """Return `held_state` without the state of optimizers, which may be a copy."""
        state: dict[str, Any] = {} if self.weights is None else {"model": self.weights}
        if self.named:
            groups = ([{"params": names} for names in each.groups] for each in self.named)
            state["optimizer"] = [{"param_groups": each} for each in groups]
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, copies: bool) -> None:
        if self.weights is not None:
            self.weights.load()
        for each, own in zip(self.named, state.get("optimizer", ()), strict=True):
            each.load(own)


def _owner(model: Model | None, optimizer: Optimizer | Sequence[Optimizer] | None) -> _Loop | Laid:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*(optimizer or ())]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer: expected optimizers, found a {type(each).__name__}")
    if isinstance(model, Laid) and not isinstance(model, nn.Module):
        if optimizers:
            raise ValueError("a Trainable brings its optimizer: leave optimizer out")
        return model
    modules = [model] if isinstance(model, nn.Module) else [*cast("Sequence[Any]", model or ())]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"model: expected modules or a Trainable, found a {type(each).__name__}"
            )
    return _Loop(modules, optimizers)


def model_state(model: Model) -> ModelState:
    """Return the state of a ``model`` as `save` takes it; nothing is sent."""
    owner = _owner(model, None)
    return (owner.outline() if isinstance(owner, _Loop) else owner.held_state())["model"]


def _states(given: Stated) -> Any:  # noqa: ANN401 - any state
    if isinstance(given, Stateful):
        return dict(given.state_dict())
    if isinstance(given, Mapping):
        return {key: _states(each) for key, each in given.items()}
    return [_states(each) for each in given]


def _load_states(given: Stated, state: Any) -> None:  # noqa: ANN401 - any state
    if isinstance(given, Stateful):
        given.load_state_dict(state)
        return
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
    for key, each in pairs:
        _load_states(each, state[key])


def _form(given: Stated) -> JSON:
    """The class name of each stateful object, nested like ``given``."""
    if isinstance(given, Stateful):
        return type(given).__name__
    if isinstance(given, Mapping):
        return {str(key): _form(each) for key, each in given.items()}
    if isinstance(given, Sequence):
        return [_form(each) for each in given]
    raise TypeError(
        f"expected something with state_dict and load_state_dict, found a {type(given).__name__}"
    )


def _compare_forms(saved: SavedState, place: str, there: JSON, here: JSON) -> None:
    """Compare the forms of saved and given objects; older checkpoints have no forms.

    Logs a state of another class, because a scheduler accepts any state. Raises
    CheckpointMismatchError for another number or nesting.
    """
    if there is None:
        return
    if isinstance(there, str) and isinstance(here, str):
        if there != here:
            _log.warning(
                "%s of %s is the state of a %s, and a %s is given it: leave it out if it is "
                "another one",
                place,
                saved.path,
                there,
                here,
            )
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (one, other) in enumerate(zip(there, here, strict=True)):
            _compare_forms(saved, f"{place}[{number}]", one, other)
    elif isinstance(there, dict) and isinstance(here, dict) and here.keys() <= there.keys():
        for key, other in here.items():
            _compare_forms(saved, f"{place}[{key!r}]", there[key], other)
    else:
        raise CheckpointMismatchError(
            f"{place} of {saved.path} was saved from {there}, and {here} is given: pass it in the "
            "form in which it was saved"
        )


def _described(weights: ModelState) -> tuple[dict[str, Tensor], JSON]:
    """Return the tensors of a model, tied ones once, and its structure.

    Raises ValueError if its modules have different values under one name.
    """
    weights.check_copies()
    tensors = {f"{PREFIX}/model/{name}": tensor for name, tensor in weights.tensors.items()}
    structure: dict[str, JSON] = {
        name: {"$tensor": f"{PREFIX}/model/{weights.ties.get(name, name)}"}
        for name in (*weights.tensors, *weights.ties)
    }
    for name, value in weights.rest.items():
        found, structure[name] = flatten(value, f"{PREFIX}/model/{name}")
        tensors.update(cast("dict[str, Tensor]", found))
    return tensors, structure


def _joined(rows: Sequence[Any], place: str) -> Any:  # noqa: ANN401 - JSON
    """Merge the structures of all ranks. Raises ValueError if they differ."""
    first = rows[0]
    if all(row == first for row in rows):
        return first
    if all(isinstance(row, dict) for row in rows):
        keys = dict.fromkeys(key for row in rows for key in row)
        return {k: _joined([r[k] for r in rows if k in r], f"{place}.{k}") for k in keys}
    if all(isinstance(row, list) for row in rows):
        if _OWN_PARAMETERS.search(place):  # each rank of a pipeline has others
            return list(dict.fromkeys(name for row in rows for name in row))
        if len({len(row) for row in rows}) == 1:
            return [
                _joined(each, f"{place}[{n}]") for n, each in enumerate(zip(*rows, strict=True))
            ]
    other = next(row for row in rows if row != first)
    raise ValueError(
        f"{place} differs between ranks: {str(first)[:60]} and {str(other)[:60]}; save what all "
        "ranks have alike, or what is each rank's own under a key of its own, as "
        'extra={f"mine/{rank}": ...}'
    )


# ------------------------------------------------------------------------------ random numbers


def _generator_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and ``device``."""
    version, words, gauss = getstate()
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (
            name,
            torch.from_numpy(keys.astype(np.int64)),
            *(x.item() if isinstance(x, np.generic) else x for x in rest),
        ),
        "torch": torch.get_rng_state(),
    }
    if not is_host(device):
        state["device"] = torch.get_device_module(device).get_rng_state(device).cpu()
    return state


def _restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `_generator_state`; a device without saved state keeps its own."""
    version, words, gauss = state["python"]
    setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and not is_host(device):
        torch.get_device_module(device).set_rng_state(state["device"], device)
