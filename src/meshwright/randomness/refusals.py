"""Random operators whose numbers depend on the layout, found before or while they run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.plan import match_names
from meshwright.randomness.draws import Draws
from meshwright.torch_internals.tensors import TorchDispatchMode, schema_of

_KNOWN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_RANDOM = (nn.RReLU, nn.FeatureAlphaDropout, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_OFF = {"p": 0.0, "dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments that turn a random operator off."""


def declared(model: nn.Module, per_rank: Sequence[str]) -> set[str]:
    """Return the names of modules in which each rank draws for itself: matches and submodules.

    Raises ValueError for a pattern that matches nothing.
    """
    names = [name for name, _ in model.named_modules()]
    found: set[str] = set()
    for pattern in per_rank:
        matched = match_names(pattern, names)
        if not matched:
            raise ValueError(f"per_rank: {pattern!r} matches no module of {type(model).__name__}")
        for top in matched:
            found |= {name for name in names if name == top or name.startswith(f"{top}.")}
    return found


def let_draw(names: Iterable[str]) -> str:
    """Advice on how to let the modules ``names`` draw on each rank; numbers become ``*``."""
    patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names if name)
    if not patterns:  # the root itself, of which a pattern would name all
        return "put it into a module of its own, and name that in [train] per_rank"
    listed = ", ".join(f'"{pattern}"' for pattern in patterns)
    return f"let each rank draw for itself there: [train] per_rank = [{listed}]"


def random_modules(module: nn.Module) -> str | None:
    """Describe why ``module`` draws its own random numbers in training, or return None."""
    kind = type(module).__name__
    match module:
        case nn.MultiheadAttention() if module.dropout > 0:
            return f"{kind} with dropout={module.dropout} inside its attention"
        case nn.RNNBase() if module.dropout > 0 and module.num_layers > 1:
            return f"{kind} with dropout={module.dropout} between its layers"
        case _ if isinstance(module, _RANDOM):
            return kind
        case _ if isinstance(module, _KNOWN):
            # A subclass may draw in another way; ours does not.
            is_known = type(module) in _KNOWN or isinstance(getattr(module, "_draws", None), Draws)
            return None if is_known else f"{kind}, a dropout of its own kind"
    return None


class RandomOperators(TorchDispatchMode):
    """Raises at the first random operator in the block, naming it and its module.

    For the first forward and backward passes: functional dropout, dropout inside attention and
    ``torch.rand`` are visible only when they run. Modules named by ``per_rank`` may draw. With a
    list ``found``, it appends the names of the modules instead.

    >>> with RandomOperators(model, draws):
    ...     loss(model(inputs)).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        draws: Draws,
        *,
        per_rank: Sequence[str] = (),
        found: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._found = found
        self._model = model
        self._draws = draws
        self._left = declared(model, per_rank)
        self._running: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Start to watch."""
        for name, module in self._model.named_modules():
            enter = partial(self._enter, name)
            self._hooks.append(module.register_forward_pre_hook(enter))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:  # noqa: ANN401
        """Stop watching."""
        super().__exit__(exc_type, exc_val, exc_tb)
        while self._hooks:
            self._hooks.pop().remove()
        self._running.clear()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run ``func``. Raises RuntimeError if it is random and not allowed."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and not self._draws.is_drawing and not _is_off(func, args, kwargs or {}):
            name = self._running[-1] if self._running else ""
            if name not in self._left and self._found is not None:
                self._found.append(name)
            elif name not in self._left:
                where = f"module {name!r}" if self._running else "code outside of all modules"
                raise RuntimeError(
                    f"{where} ran {func}, whose random numbers depend on the layout: use an "
                    f"nn.Dropout module in its place, set its dropout to 0, or {let_draw([name])}"
                )
        return func(*args, **(kwargs or {}))

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)

    def _leave(self, *_: object) -> None:
        # Recomputation may stop early, without leaving the modules that it has entered.
        if self._running:
            self._running.pop()


def _is_off(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:  # noqa: ANN401
    schema = schema_of(func).arguments
    given = {argument.name: argument.default_value for argument in schema}
    given |= dict(zip((argument.name for argument in schema), args, strict=False))
    given |= kwargs
    # A tensor of probabilities is never off.
    return any(isinstance(given.get(n), type(off)) and given[n] == off for n, off in _OFF.items())
