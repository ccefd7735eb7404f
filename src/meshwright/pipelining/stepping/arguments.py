"""The arguments of a stage's forward, compared with those of a step before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.torch_internals.modules import compiled_call_of, forward_pre_hooks_of


class CallCheck:
    """The ways in which the module of a stage has been called, which it takes."""

    def __init__(self) -> None:
        self._seen: object = None

    def look(
        self,
        module: nn.Module,
        name: str,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        takes_args: bool,
    ) -> None:
        """Raise ``ValueError`` for microbatches that ``module`` cannot be called with."""
        called = ({*map(len, args)}, {*map(tuple, kwargs)})
        if called == self._seen:
            return
        for given, named in zip(args, kwargs or [{}] * len(args), strict=True):
            _check(module, name, given if takes_args else None, named)
        self._seen = called


def _check(
    module: nn.Module, name: str, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` for arguments of a batch that ``module`` cannot be called with.

    ``args`` are None where they come from other stages. Nothing is known, and so nothing is said,
    of modules that are called in ways of their own: with hooks before them, or by a class.
    """
    is_own = type(module).__call__ is not nn.Module.__call__
    if is_own or forward_pre_hooks_of(module) or compiled_call_of(module) is not None:
        return
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of C, or of a script
        return
    try:
        if args is None:
            signature.bind_partial(**kwargs)
        else:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        given = [] if args is None else [f"{len(args)} positional arguments"]
        given += [f"the keywords {list(kwargs)}"] if kwargs else []
        raise ValueError(
            f"{name} expects the arguments ({taken}) of {type(module).__name__}, but this step got "
            f"{' and '.join(given)}: {error}. The target of the last stage goes by target="
        ) from error
