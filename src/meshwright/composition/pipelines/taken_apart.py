"""Guards on modules of a model that a pipeline has split, for what no longer works on them.

A pipeline does not call modules that it has split, and runs a stage's forward on that stage's rank,
perhaps on another microbatch than the one whose loss is computed. So later hooks on such modules
are rejected, and so are reads of attributes that their forward writes, which would be stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from torch import nn

from meshwright.composition.pipelines.stages import CutModel
from meshwright.errors import LayoutError

_ABOUT = "_meshwright_about"


class LossScope:
    """Open while a loss is computed."""

    def __init__(self) -> None:
        self.is_open = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Open it for the block."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


def guard(
    model: nn.Module,
    found: CutModel,
    mine: Sequence[int],
    ranks: Sequence[int],
    scope: LossScope,
) -> None:
    """Make modules of ``model`` reject, by name, what the stages of ``found`` do not do.

    ``mine`` are the stages of this rank, ``ranks`` the ranks of all stages.
    """
    last = len(found.modules) - 1
    homes = {part: n for n, stage in enumerate(found.modules) for part in stage.modules()}
    classes: dict[object, type] = {}
    here: dict[str, list[nn.Module]] = {}
    for number in mine:
        for name, part in found.modules[number].named_modules():
            here.setdefault(name, []).append(part)
    for name, part in model.named_modules():
        stage, keys = homes.get(part), found.written.get(name, frozenset[str]())
        text = "whose own forward no stage runs"
        if stage is not None:
            text = f"whose forward runs in stage {stage}, on rank {ranks[stage]}"
        is_live = stage in mine
        if is_live and stage == last:
            continue
        called = name or type(part).__name__
        vars(part)[_ABOUT] = _About(
            called,
            text,
            found.info is not None,
            scope if is_live else None,
            () if stage is not None else tuple(here.get(name, ())),
        )
        kind = type(part)
        known = (kind, stage is None, keys)
        if known not in classes:
            bases = (_TakenApart, kind) if stage is None else (kind,)
            members = {key: _Written(key) for key in keys}
            classes[known] = type(kind)(kind.__name__, bases, members)
        part.__class__ = classes[known]


@dataclass(frozen=True, slots=True)
class _About:
    """What a guarded module knows about itself."""

    name: str
    text: str
    """Where its forward runs, if it does."""
    is_traced: bool
    scope: LossScope | None
    """While it is open, reads of attributes raise; if None, always."""
    parts: tuple[nn.Module, ...]
    """The modules that stages of this rank have in its place."""


class _Written:
    """An attribute that a forward writes elsewhere or at another time: reading it raises."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._owner: Any = object

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, module: nn.Module | None, kind: type) -> Any:  # noqa: ANN401
        if module is None:
            return getattr(super(self._owner, kind), self._key)  # pyrefly: ignore
        about: _About = vars(module)[_ABOUT]
        if about.scope is None or about.scope.is_open:
            raise LayoutError(
                f"the attribute {self._key!r} of module {about.name!r}, {about.text}, was read "
                f"{'here' if about.scope is None else 'in the loss'}, and is not what the forward "
                "of this microbatch has written. Return it from the model's forward, with the "
                "output"
            )
        if self._key in vars(module):
            return vars(module)[self._key]
        return getattr(super(self._owner, module), self._key)  # pyrefly: ignore

    def __set__(self, module: nn.Module, value: object) -> None:
        vars(module)[self._key] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self._key]


def _refusing(what: str) -> Callable[..., NoReturn]:
    """Make a method that raises RuntimeError for ``what``."""

    def refuse(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
        about: _About = vars(self)[_ABOUT]
        raise RuntimeError(
            f"a {what} on module {about.name!r}, {about.text}, would never run: put it on a module "
            "in one of `Trainable.entries`, the stages of this rank"
        )

    return refuse


class _TakenApart(nn.Module):
    """A module that no stage calls: hooks on its calls would not run."""

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Set a parameter or buffer also on the stage's modules that use it."""
        super().__setattr__(name, value)
        about: _About = vars(self)[_ABOUT]
        for part in about.parts:
            if name in part._parameters or name in part._buffers:
                setattr(part, name, value)

    def train(self, mode: bool = True) -> Self:
        """Raise RuntimeError if that has no effect: a traced stage has its own mode."""
        about: _About = vars(self)[_ABOUT]
        if about.is_traced and mode is not self.training:
            raise RuntimeError(
                f"module {about.name!r}, {about.text}, was traced into stages, which have a mode "
                "of their own: call train() of `Trainable.module`. `Trainable.eval` needs neither"
            )
        return super().train(mode)

    register_forward_pre_hook = _refusing("forward pre-hook")
    register_forward_hook = _refusing("forward hook")
    register_full_backward_pre_hook = _refusing("backward pre-hook")
    register_full_backward_hook = _refusing("backward hook")
    register_backward_hook = _refusing("backward hook")
