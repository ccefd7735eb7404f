"""The tensors in whatever a module is given or returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from meshwright.torch_internals.trees import tree_leaves, tree_map


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """List the tensors in nested containers of Python's, dataclasses, and what is registered."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif value is None or isinstance(value, int | float | str | bytes):
        return
    elif isinstance(value, Sequence) or isinstance(value, Set):  # noqa: SIM101 - generic in a union
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for member in fields(value):
            yield from tensors_in(getattr(value, member.name))
    else:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:  # noqa: ANN401
    """Give ``value`` with ``function`` of its tensors in their places.

    Registered containers (sequences and mappings are) are made anew; dataclasses, which need not be
    registered, and sets are copied where one of their tensors has changed.
    """
    return tree_map(partial(_mapped, function), value)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:  # noqa: ANN401
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if type(leaf) in (set, frozenset):
        return type(leaf)(map_tensors(function, item) for item in leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    held = {member.name: getattr(leaf, member.name) for member in fields(leaf)}
    changed = {
        name: map_tensors(function, item)
        for name, item in held.items()
        if any(function(tensor) is not tensor for tensor in tensors_in(item))
    }
    if changed:
        leaf = copy.copy(leaf)
        for name, item in changed.items():
            object.__setattr__(leaf, name, item)  # some are frozen
    return leaf
